"""The runtime of the quantization scheme "int4_groups"."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from glowplug.core.api import EnginePlan
from glowplug.core.layers.module import Target
from glowplug.core.layers.slices import linear_slices
from glowplug.core.protocols import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    Quantized,
    WeightTarget,
    Worker,
)
from glowplug_int4.plugin import Int4Options


class Int4Groups:
    """Linear layers in int4; experts and layers without whole groups are left alone."""

    fused_shared = False

    def __init__(self, options: Int4Options, plan: EnginePlan, worker: Worker) -> None:
        self._group = options.group
        self._dtype: torch.dtype = worker.dtype
        self.block = 1

    def covers(self, module: str, rows: int, columns: int) -> bool:
        return columns % self._group == 0

    def linear(self, shape: LinearShape) -> LinearMethod | None:
        if shape.inputs % self._group or shape.col_start % self._group:
            return None  # this rank's columns begin or end within a group
        return Int4Linear(shape, self._group, self._dtype)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod | None:
        return None


class Int4Linear:
    """One linear layer: two codes in a byte, and a scale for each group of inputs."""

    input_format = "plain"

    def __init__(self, shape: LinearShape, group: int, dtype: torch.dtype) -> None:
        rows = sum(shape.outputs)
        self._shape = shape
        self._group = group
        self._dtype = dtype
        self.codes = torch.zeros(rows, shape.inputs // 2, dtype=torch.uint8)
        self.scales = torch.zeros(rows, shape.inputs // group, 1, dtype=torch.float16)
        self.bias = torch.zeros(rows, dtype=dtype) if shape.bias else None

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, rows in linear_slices(self._shape):
            yield Target(f"{name}.weight", full, index=index, put=partial(self._quantize, rows))
            if self.bias is not None:
                yield Target(f"{name}.bias", full[:1], self.bias[rows], index[:1])

    def _quantize(self, rows: slice, weight: Tensor) -> None:
        grouped = weight.float().unflatten(1, (-1, self._group))
        scales = (grouped.abs().amax(-1, keepdim=True) / 7).half().clamp(min=1e-7)
        codes = (grouped / scales.float()).round().clamp(-8, 7).flatten(1).to(torch.int16) + 8
        self.codes[rows] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        self.scales[rows] = scales

    def finalize(self) -> None:
        if self.bias is not None and self._shape.col_start > 0:
            self.bias.zero_()  # ranks add up their results, and the first one adds the bias

    def dense(self) -> Tensor:
        pairs = torch.stack((self.codes % 16, self.codes // 16), dim=-1).flatten(1)
        grouped = (pairs.to(torch.int16) - 8).float().unflatten(1, (-1, self._group))
        return (grouped * self.scales.float()).flatten(1).to(self._dtype)

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        return torch.nn.functional.linear(values, self.dense(), self.bias)
