"""The runtime of ``ops.triton``: what Triton does better than torch; the rest is ``ops.torch``'s."""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import RopeRows, Worker
from glowplug.kernels.triton import activation, norm, rope
from glowplug.plugins.ops.torch_ops_runtime import TorchOps

if TYPE_CHECKING:
    from glowplug.plugins.ops.triton_ops import TritonOpsOptions


class TritonOps(TorchOps):
    """``Ops`` for one rank on a CUDA device."""

    def __init__(self, options: TritonOpsOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self.rms_norm = norm.rms_norm
        self.add_rms_norm = norm.add_rms_norm
        self.silu_and_mul = activation.silu_and_mul

    def rope_at(self, table: Tensor, positions: Tensor, interleaved: bool) -> RopeRows:
        return RopeRows(table.index_select(0, positions), interleaved)

    def rope(self, q: Tensor, k: Tensor, at: object) -> tuple[Tensor, Tensor]:
        assert isinstance(at, RopeRows)
        return rope.rotate(q, k, at.cos_sin, at.interleaved)
