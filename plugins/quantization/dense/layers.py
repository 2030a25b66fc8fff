"""Linear and expert layers over dense weights, reused by schemes that dequantise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from glowplug.core.layers.module import Target
from glowplug.core.layers.slices import expert_slices, linear_slices
from glowplug.core.protocols import ExpertsShape, LinearShape, Quantized, WeightTarget
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.moe import reference as moe_reference


class Biased:
    """Base of ``LinearMethod`` classes, which holds the bias; subclasses hold the weight.

    Attributes:
        shape: the layer's shape.
        bias: [sum(outputs)], or None.
    """

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        self.bias = (
            torch.empty(sum(shape.outputs), dtype=dtype, device=device) if shape.bias else None
        )

    def bias_targets(self) -> Iterator[WeightTarget]:
        if self.bias is None:
            return
        for name, (rows, _), (held, _), span in linear_slices(self.shape):
            yield Target(f"{name}.bias", (rows,), self.bias[span], (held,))

    def finalize(self) -> None:
        if self.bias is not None and self.shape.col_start > 0:
            # the partial sums of the ranks are added up, so only the first rank adds the bias
            self.bias.zero_()


class DenseLinear(Biased):
    """``LinearMethod`` with an input-major dense weight [inputs, sum(outputs)].

    NOTE: a CPU multiplies one to sixteen rows by an input-major weight up to twice as fast.
    """

    input_format = "plain"

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: str) -> None:
        super().__init__(shape, dtype, device)
        self.weight = torch.empty(shape.inputs, sum(shape.outputs), dtype=dtype, device=device)

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, span in linear_slices(self.shape):
            yield Target(f"{name}.weight", full, self.weight.t()[span], index)
        yield from self.bias_targets()

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        if self.bias is None:
            return torch.mm(values, self.weight)
        return torch.addmm(self.bias, values, self.weight)

    def dense(self) -> Tensor:
        return self.weight.t()


class DenseExperts:
    """``ExpertsMethod`` with input-major dense weights.

    Attributes:
        w13: [E, hidden, 2 * inter].
        w2: [E, inter, hidden].
    """

    input_format = "plain"

    def __init__(self, shape: ExpertsShape, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        self.w13 = torch.empty(
            shape.count, shape.hidden, 2 * shape.inter, dtype=dtype, device=device
        )
        self.w2 = torch.empty(shape.count, shape.inter, shape.hidden, dtype=dtype, device=device)
        placed = shape.held is not None
        split = placed or shape.count < shape.total or shape.inter < shape.inter_full
        # only a layer that is split among ranks may get ids of experts held elsewhere
        host = moe_reference.experts_some_host if split else moe_reference.experts_host
        self._run = host if torch.device(device).type == "cpu" else moe_reference.experts_device

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, span in expert_slices(self.shape):
            held = self.w2[expert] if span is None else self.w13[expert, :, span]
            yield Target(f"{name}.weight", full, held.t(), index)

    def finalize(self) -> None:
        return

    def activate(self, hidden: Tensor) -> Tensor:
        return silu_and_mul(hidden)

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        return self._run(values, self.w13, self.w2, ids, weights, self.activate)
