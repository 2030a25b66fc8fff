"""Routed experts over dense weights on CUDA, in Triton; the shared expert may be fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from glowplug.core.layers.module import Target, part_of
from glowplug.core.layers.slices import expert_slices
from glowplug.core.protocols import ExpertsShape, Parts, Quantized, WeightTarget
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.moe import experts as moe_experts
from glowplug.kernels.moe.gemm import Early
from glowplug.kernels.moe.sum import moe_sum

ALL = slice(None)
SharedSlice = tuple[str, tuple[int, int], tuple[slice, slice], slice | None]


def shared_slices(shape: ExpertsShape) -> Iterator[SharedSlice]:
    """Yield this rank's part of each checkpoint matrix of the shared expert.

    The part is one run of neighbouring channels, which is then cut into slices for the S fused
    experts. Which channels a rank computes does not matter for the sum over the ranks.

    Yields:
        Module name, shape of the matrix, the rank's slice of it, and its rows within w13 (None:
        w2).
    """
    if not shape.fused_shared:
        return
    width = shape.fused_shared * shape.inter_full
    part = part_of(shape.fused_shared * shape.inter_start, shape.fused_shared * shape.inter, width)
    for half, name in enumerate(shape.names[:2]):
        rows = slice(half * shape.inter, (half + 1) * shape.inter)
        yield f"{shape.shared_prefix}.{name}", (width, shape.hidden), (part, ALL), rows
    yield f"{shape.shared_prefix}.{shape.names[2]}", (shape.hidden, width), (ALL, part), None


class CudaExperts:
    """``ExpertsMethod`` over dense weights; the last S experts are slices of the shared expert.

    Attributes:
        w13: [E + S, 2 * inter, hidden].
        w2: [E + S, hidden, inter].
    """

    input_format = "plain"

    def __init__(self, shape: ExpertsShape, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        count = shape.count + shape.fused_shared
        self.w13 = torch.empty(count, 2 * shape.inter, shape.hidden, dtype=dtype, device=device)
        self.w2 = torch.empty(count, shape.hidden, shape.inter, dtype=dtype, device=device)
        self._ready = torch.zeros(2, dtype=torch.int32, device=device)
        self._started = False

    def targets(self) -> Iterator[WeightTarget]:
        for name, full, index, expert, rows in expert_slices(self.shape):
            yield Target(
                f"{name}.weight",
                full,
                self.w2[expert] if rows is None else self.w13[expert, rows],
                index,
            )
        for name, full, index, rows in shared_slices(self.shape):
            yield Target(
                f"{name}.weight", full, index=index, put=partial(self._take_shared, rows=rows)
            )

    def _take_shared(self, value: Tensor, *, rows: slice | None) -> None:
        """Store a checkpoint matrix of the shared expert, cut into slices for the fused experts.

        Args:
            value: gate or up projection [S * inter, hidden], or down projection [hidden, S *
                inter].
            rows: rows of w13 for a gate or up projection; None: ``value`` is the down projection.
        """
        shape = self.shape
        if rows is None:
            self.w2[shape.count :].copy_(
                value.reshape(shape.hidden, shape.fused_shared, shape.inter).transpose(0, 1)
            )
        else:
            self.w13[shape.count :, rows].copy_(
                value.reshape(shape.fused_shared, shape.inter, shape.hidden)
            )

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        return self.finish(
            (x.values if isinstance(x, Quantized) else x).contiguous(), ids, weights, None
        )

    def start(self, x: Tensor, width: int) -> Started | None:
        """Launch the experts' first kernel before the gate, and return a handle to go on with.

        The result is None if no kernel can start before the gate. ``width``: number of experts of a
        token, fused shared experts included. See ``ExpertsMethod``.
        """
        if not dependent_launch.supported():
            return None
        early = moe_experts.begin(x, self.w13, width, self.shape.fused_shared, self._ready)
        if early is None:
            return None
        # NOTE: a step that failed after its gate left the ready flag set, which this step would
        # take for its own
        if self._started:
            self._ready.zero_()
        self._started = True
        return Started(self, x, early)

    def finish(
        self, x: Tensor, ids: Tensor, weights: Tensor, early: Early | None
    ) -> Tensor | Parts:
        """Compute the experts' result, continuing the work ``early`` that ``start`` launched.

        ``early`` is None if nothing was launched before the gate.
        """
        rows, named = moe_experts.products(
            x, self.w13, self.w2, ids, weights, fused_shared=self.shape.fused_shared, early=early
        )
        if early is not None:
            self._started = False
        if named is None:
            return rows
        return Parts(rows, named) if self.shape.parts else moe_sum(rows, named)


@dataclass(frozen=True)
class Started:
    """``StartedExperts``: handle of experts whose first kernel was launched before the gate."""

    method: CudaExperts
    x: Tensor
    early: Early

    @property
    def ready(self) -> Tensor:
        """Ready flag, int32, that the gate sets once x is complete."""
        return self.early.ready

    def finish(self, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        return self.method.finish(self.x, ids, weights, self.early)
