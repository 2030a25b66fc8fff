"""The runtime of the quantization scheme "mixed", for one rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from glowplug.core.api import EnginePlan
from glowplug.core.layers.module import Target
from glowplug.core.layers.slices import linear_slices
from glowplug.core.protocols import LinearMethod, LinearShape, Quantized, WeightTarget, Worker
from tests.plugins.mixed import MixedOptions, bits_of


class Mixed:
    block = 1
    fused_shared = False

    def __init__(self, options: MixedOptions, plan: EnginePlan, worker: Worker) -> None:
        self._model = plan.facts.model
        self._dtype = worker.dtype

    def covers(self, module: str, rows: int, columns: int) -> bool:
        return module != "lm_head"

    def linear(self, shape: LinearShape) -> LinearMethod | None:
        return MixedLinear(shape, bits_of(self._model, shape.parts[0]), self._dtype)

    def experts(self, shape: object) -> None:
        return None


class MixedLinear:
    input_format = "plain"

    def __init__(self, shape: LinearShape, bits: int, dtype: torch.dtype) -> None:
        rows = sum(shape.outputs)
        self.shape = shape
        self.bits = bits
        self.dtype = dtype
        self.codes = torch.zeros(rows, shape.inputs * bits // 8, dtype=torch.uint8)
        self.scales = torch.zeros(rows, 1, dtype=torch.float16)

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, _, rows in linear_slices(self.shape):
            whole = (slice(None), slice(None))
            codes = (full[0], full[1] * self.bits // 8)
            yield Target(f"{name}.codes", codes, self.codes[rows], whole, dtype="uint8")
            yield Target(f"{name}.scales", (full[0], 1), self.scales[rows], whole)

    def finalize(self) -> None:
        pass

    def dense(self) -> Tensor:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes % 16, codes // 16), dim=-1).flatten(1)
        middle = 1 << self.bits - 1
        return ((codes.float() - middle) / middle * self.scales.float()).to(self.dtype)

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        return torch.nn.functional.linear(values, self.dense())
