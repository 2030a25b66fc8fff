"""Methods over dense weights. Schemes without their own kernels reuse them after dequantising."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from glowplug.core.layers.module import Target, part_of
from glowplug.core.protocols import ExpertsShape, LinearShape, Quantized, WeightTarget
from glowplug.kernels import moe
from glowplug.kernels.activation import silu_and_mul

PARTS13 = ("gate_proj", "up_proj")


def weight_index(shape: LinearShape, part: int) -> tuple[slice, slice]:
    """The slice of part ``part``'s checkpoint weight that this rank holds."""
    rows, columns = shape.full[part]
    return part_of(shape.row_starts[part], shape.outputs[part], rows), part_of(shape.col_start, shape.inputs, columns)


def row_spans(shape: LinearShape) -> list[slice]:
    """Rows of each part within the fused weight."""
    spans, start = [], 0
    for size in shape.outputs:
        spans.append(slice(start, start + size))
        start += size
    return spans


class DenseLinear:
    """The weight, input-major: [inputs, sum(outputs)].

    NOTE: input-major because a CPU multiplies one to sixteen rows by it up to twice as fast.
    """

    input_format = "plain"

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        self.weight = torch.empty(shape.inputs, sum(shape.outputs), dtype=dtype, device=device)
        self.bias = torch.empty(sum(shape.outputs), dtype=dtype, device=device) if shape.bias else None

    def targets(self) -> Iterator[WeightTarget]:
        for part, (name, span) in enumerate(zip(self.shape.parts, row_spans(self.shape), strict=True)):
            yield Target(f"{name}.weight", self.shape.full[part], self.weight.t()[span],
                         weight_index(self.shape, part))
        yield from self.bias_targets()

    def bias_targets(self) -> Iterator[WeightTarget]:
        if self.bias is None:
            return
        for part, (name, span) in enumerate(zip(self.shape.parts, row_spans(self.shape), strict=True)):
            rows, _ = weight_index(self.shape, part)
            yield Target(f"{name}.bias", self.shape.full[part][:1], self.bias[span], (rows,))

    def finalize(self) -> None:
        if self.bias is not None and self.shape.col_start > 0:
            self.bias.zero_()  # partial sums over columns are added up: the first rank alone brings the bias

    def apply(self, x: Tensor | Quantized) -> Tensor:
        values = x.values if isinstance(x, Quantized) else x
        if self.bias is None:
            return torch.mm(values, self.weight)
        return torch.addmm(self.bias, values, self.weight)

    def dense(self) -> Tensor:
        return self.weight.t()


class DenseExperts:
    """w13 [E, hidden, 2 * inter] and w2 [E, inter, hidden], input-major."""

    input_format = "plain"

    def __init__(self, shape: ExpertsShape, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        self.w13 = torch.empty(shape.count, shape.hidden, 2 * shape.inter, dtype=dtype, device=device)
        self.w2 = torch.empty(shape.count, shape.inter, shape.hidden, dtype=dtype, device=device)
        shared = shape.count < shape.total or shape.inter < shape.inter_full
        host = moe.experts_some_host if shared else moe.experts_host  # only among ranks can an expert be elsewhere
        self._run = host if torch.device(device).type == "cpu" else moe.experts_device

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


def expert_slices(
    shape: ExpertsShape,
) -> Iterator[tuple[str, tuple[int, int], tuple[slice, slice], int, slice | None]]:
    """For each checkpoint matrix of the experts held here: module name, its shape, this rank's slice of it, the local
    expert number, and its columns within w13 (None: it is w2)."""
    width = part_of(shape.inter_start, shape.inter, shape.inter_full)
    every = slice(None)
    for local in range(shape.count):
        prefix = f"{shape.prefix}.{shape.first + local}"
        for half, part in enumerate(PARTS13):
            span = slice(half * shape.inter, (half + 1) * shape.inter)
            yield f"{prefix}.{part}", (shape.inter_full, shape.hidden), (width, every), local, span
        yield f"{prefix}.down_proj", (shape.hidden, shape.inter_full), (every, width), local, None
