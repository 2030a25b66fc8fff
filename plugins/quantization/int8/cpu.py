"""The runtime of ``quantization.w8a8_int8`` in plain torch, where products do not run in int8.

Weights are dequantised once, as they arrive; activations may be rounded to what int8 would hold. A
product is then that of an int8 GEMM up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glowplug.core.facts.stored_formats import INT8_METHODS, quantization_config
from glowplug.core.layers.module import Target
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    QuantizationScheme,
    Quantized,
    WeightTarget,
    Worker,
)
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.formats import int8
from glowplug.plugins.quantization.dense.layers import (
    DenseExperts,
    DenseLinear,
    expert_slices,
    linear_slices,
)
from glowplug.plugins.quantization.shared.skipped_modules import left_alone, listed

if TYPE_CHECKING:
    from glowplug.plugins.quantization.int8.plugin import W8A8Int8Options

STORED = "int8"
Put = Callable[[Tensor, Tensor], None]


def w8a8_int8(options: W8A8Int8Options, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
    """The scheme for ``worker``'s device: products in int8 on CUDA, of dequantised weights
    elsewhere.
    """
    if torch.device(worker.device).type == "cuda" and options.activations != "none":
        from glowplug.plugins.quantization.int8.cuda import W8A8Int8Cuda  # it imports this module

        return W8A8Int8Cuda(options, plan, worker)
    return W8A8Int8(options, plan, worker)


class Source:
    """What a checkpoint stores: int8 weights and scales of which shape, or weights that are
    quantised on arrival.
    """

    def __init__(self, plan: EnginePlan) -> None:
        facts = plan.facts.model
        self._tensors = facts.tensors
        self._listed = listed(quantization_config(facts))
        self._native = facts.quant_method in INT8_METHODS

    def covers(self, module: str) -> bool:
        weight = self._tensors.get(f"{module}.weight")
        if weight is not None and (self._native or weight.dtype == STORED):
            return weight.dtype == STORED
        return not left_alone(module, self._listed)

    def native(self, module: str) -> bool:
        weight = self._tensors.get(f"{module}.weight")
        return self._native if weight is None else weight.dtype == STORED

    def scale_shape(self, module: str, rows: int) -> tuple[int, ...]:
        """[N, 1], unless the checkpoint has [N]."""
        stored = self._tensors.get(f"{module}.weight_scale")
        return (rows,) if stored is not None and len(stored.shape) == 1 else (rows, 1)

    def targets(
        self,
        module: str,
        full: tuple[int, int],
        index: tuple[slice, slice],
        put: Put,
    ) -> Iterator[WeightTarget]:
        """Of the slice ``index`` of a matrix; ``put`` gets int8 [R, C] and float scales [R] once
        both are there.
        """
        matrix = _Matrix(index, put)
        if not self.native(module):  # whole rows, so that ranks quantise as one would
            yield Target(
                f"{module}.weight", full, index=(index[0], slice(None)), put=matrix.quantize
            )
            return
        shape = self.scale_shape(module, full[0])
        yield Target(f"{module}.weight", full, index=index, dtype=STORED, put=matrix.take_weight)
        yield Target(
            f"{module}.weight_scale",
            shape,
            index=(index[0], slice(None))[: len(shape)],
            put=matrix.take_scales,
        )


@dataclass(eq=False)
class _Matrix:
    """One matrix on its way: weight and scales, whichever comes first."""

    index: tuple[slice, slice]
    put: Put
    weight: Tensor | None = None
    scales: Tensor | None = None

    def take_weight(self, value: Tensor) -> None:
        self.weight = (
            value if value.is_cpu else value.clone()
        )  # on a device it is part of a larger block
        self._finish()

    def take_scales(self, value: Tensor) -> None:
        self.scales = value.reshape(-1).to(torch.float32, copy=True)
        self._finish()

    def _finish(self) -> None:
        if self.weight is not None and self.scales is not None:
            self.put(self.weight, self.scales)
            self.weight = self.scales = None

    def quantize(self, value: Tensor) -> None:
        stored, scales = int8.quantize_weight(value)
        self.put(stored[:, self.index[1]], scales)


class W8A8Int8:
    """``QuantizationScheme``. Ranks split dimensions anywhere: a row's scale holds for every slice
    of it.
    """

    block = 1
    fuses_shared = False

    def __init__(self, options: W8A8Int8Options, plan: EnginePlan, worker: Worker) -> None:
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._device = worker.device
        self._source = Source(plan)
        self._rounds = options.activations == "dynamic"

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Int8Linear(shape, self._dtype, self._device, self._source, self._rounds)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return Int8Experts(shape, self._dtype, self._device, self._source, self._rounds)

    def covers(self, module: str) -> bool:
        return self._source.covers(module)


def _into(destination: Tensor) -> Put:
    """Dequantises into ``destination`` [R, C]."""

    def put(stored: Tensor, scales: Tensor) -> None:
        destination.copy_(int8.dequantize(stored, scales, destination.dtype))

    return put


class Int8Linear(DenseLinear):
    """``LinearMethod`` over dequantised weights. ``rounds``: activations are first rounded to
    int8's grid.
    """

    def __init__(
        self, shape: LinearShape, dtype: torch.dtype, device: str, source: Source, rounds: bool
    ) -> None:
        super().__init__(shape, dtype, device)
        self._source = source
        self._rounds = rounds

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            yield from self._source.targets(name, full, index, _into(self.weight.t()[span]))
        yield from self.bias_targets()

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        return super().apply(int8.fake_quantize_tokens(values) if self._rounds else values)


class Int8Experts(DenseExperts):
    """``ExpertsMethod`` over dequantised weights. ``rounds``: input and inner activations are
    rounded.
    """

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, source: Source, rounds: bool
    ) -> None:
        super().__init__(shape, dtype, device)
        self._source = source
        self._rounds = rounds

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            held = self.w2[expert] if span is None else self.w13[expert, :, span]
            yield from self._source.targets(name, full, index, _into(held.t()))

    def activate(self, hidden: Tensor) -> Tensor:
        inner = silu_and_mul(hidden)
        return int8.fake_quantize_tokens(inner) if self._rounds else inner

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        return super().apply(
            int8.fake_quantize_tokens(values) if self._rounds else values, ids, weights
        )
