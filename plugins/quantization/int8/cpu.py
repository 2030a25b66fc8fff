"""Runtime of ``quantization.w8a8_int8`` in plain torch, for devices without int8 GEMMs.

Weights are dequantised once, as they arrive; activations may be rounded to int8 values. A result
equals that of an int8 GEMM up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glowplug.core.facts.stored_formats import quantization_config
from glowplug.core.layers.module import Target
from glowplug.core.layers.slices import expert_slices, linear_slices
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    Quantized,
    WeightTarget,
    Worker,
)
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.formats import int8
from glowplug.plugins.quantization.dense.layers import DenseExperts, DenseLinear
from glowplug.plugins.quantization.int8.plugin import METHODS
from glowplug.plugins.quantization.shared.skipped_modules import left_alone, listed

if TYPE_CHECKING:
    from glowplug.plugins.quantization.int8.plugin import W8A8Int8Options

STORED = "int8"  #: dtype of quantised weights in the checkpoint
Put = Callable[[Tensor, Tensor], None]  #: callback for weight and scales of a slice


class Int8Source:
    """The tensors of a checkpoint: int8 weights with scales, or weights to quantise."""

    def __init__(self, plan: EnginePlan) -> None:
        facts = plan.facts.model
        self._tensors = facts.tensors
        self._listed = listed(quantization_config(facts))
        self._native = facts.quant_method in METHODS

    def covers(self, module: str) -> bool:
        """Return True if ``module`` is quantised, in the checkpoint or while loading."""
        weight = self._tensors.get(f"{module}.weight")
        if weight is not None and (self._native or weight.dtype == STORED):
            return weight.dtype == STORED
        return not left_alone(module, self._listed)

    def native(self, module: str) -> bool:
        """Return True if the checkpoint stores ``module`` in int8."""
        weight = self._tensors.get(f"{module}.weight")
        return self._native if weight is None else weight.dtype == STORED

    def scale_shape(self, module: str, rows: int) -> tuple[int, ...]:
        """Return the shape of a module's scales in the checkpoint: [N, 1] or [N], N = ``rows``."""
        stored = self._tensors.get(f"{module}.weight_scale")
        return (rows,) if stored is not None and len(stored.shape) == 1 else (rows, 1)

    def targets(
        self,
        module: str,
        full: tuple[int, int],
        index: tuple[slice, slice],
        put: Put,
    ) -> Iterator[WeightTarget]:
        """Yield the load targets of the checkpoint tensors of a matrix slice.

        Args:
            module: module name in the checkpoint.
            full: shape of the matrix.
            index: the slice of rows and of columns.
            put: called with int8 [R, C] and floating-point scales [R] once both have arrived.
        """
        matrix = _PendingMatrix(index, put)
        # whole rows, so that the scales do not depend on the number of ranks
        if not self.native(module):
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
class _PendingMatrix:
    """A matrix slice whose weight and scales arrive in any order; ``put`` is called with both."""

    index: tuple[slice, slice]
    put: Put
    weight: Tensor | None = None
    scales: Tensor | None = None

    def take_weight(self, value: Tensor) -> None:
        # a device tensor is a view of a larger block, which it would keep alive; hence the copy
        self.weight = value if value.is_cpu else value.clone()
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
    """``QuantizationScheme`` with dequantised weights.

    Ranks may split dimensions anywhere, because a row's scale is valid for every slice of the row.
    """

    block = 1
    fused_shared = False

    def __init__(self, options: W8A8Int8Options, plan: EnginePlan, worker: Worker) -> None:
        self._dtype: torch.dtype = worker.dtype or getattr(torch, plan.dtype)
        self._device = worker.device
        self._source = Int8Source(plan)
        self._rounds = options.activations == "dynamic"

    def linear(self, shape: LinearShape) -> LinearMethod:
        return Int8Linear(shape, self._dtype, self._device, self._source, self._rounds)

    def experts(self, shape: ExpertsShape) -> ExpertsMethod:
        return Int8Experts(shape, self._dtype, self._device, self._source, self._rounds)

    def covers(self, module: str, rows: int, columns: int) -> bool:
        return self._source.covers(module)


def _into(destination: Tensor) -> Put:
    """Return a callback that dequantises a matrix slice into ``destination`` [R, C]."""

    def put(stored: Tensor, scales: Tensor) -> None:
        destination.copy_(int8.dequantize(stored, scales, destination.dtype))

    return put


class Int8Linear(DenseLinear):
    """``LinearMethod`` over dequantised weights.

    Args:
        shape: the layer's shape.
        dtype: the compute dtype.
        device: the weight's device.
        source: the checkpoint.
        rounds: round activations to int8 values first.
    """

    def __init__(
        self, shape: LinearShape, dtype: torch.dtype, device: str, source: Int8Source, rounds: bool
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
    """``ExpertsMethod`` over dequantised weights.

    Args:
        shape: the layer's shape.
        dtype: the compute dtype.
        device: the weights' device.
        source: the checkpoint.
        rounds: round the input and the inner activations to int8 values.
    """

    def __init__(
        self, shape: ExpertsShape, dtype: torch.dtype, device: str, source: Int8Source, rounds: bool
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
