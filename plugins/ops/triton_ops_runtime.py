"""Runtime of ``ops.triton``: Triton kernels where they beat torch; else ``ops.torch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Parts, RopeRows, Worker
from glowplug.core.step.to_device import rows_at
from glowplug.kernels.elementwise import activation, norm, rope
from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_INPUT
from glowplug.kernels.launch.host_copy import copy_small
from glowplug.kernels.moe.route import route
from glowplug.plugins.ops import triton_int8
from glowplug.plugins.ops.quantizing import Pair, producers
from glowplug.plugins.ops.torch_ops_runtime import TorchOps

if TYPE_CHECKING:
    from glowplug.plugins.ops.triton_ops import TritonOpsOptions


class TritonOps(TorchOps):
    """``Ops`` (norms, activation, gate, rotary embedding) of one rank on a GPU, in Triton."""

    def __init__(self, options: TritonOpsOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self.rms_norm = norm.rms_norm
        self.add_rms_norm = _add_rms_norm
        self.adds_parts = True
        self.silu_and_mul = activation.silu_and_mul
        self.route = self.route_and_set_ready = route
        self.copy_small = copy_small
        self.fused: Mapping[tuple[str, str], Callable[..., Any]] = {
            **self.fused,
            **triton_int8.PRODUCERS,
            **FP8_PRODUCERS,
        }

    def rope_at(self, table: Tensor, positions: Tensor, interleaved: bool) -> RopeRows:
        return RopeRows(rows_at(table, positions), interleaved)

    def rope(self, q: Tensor, k: Tensor, at: object) -> tuple[Tensor, Tensor]:
        assert isinstance(at, RopeRows)
        return rope.rotate(q, k, at.cos_sin, at.interleaved)


def _add_rms_norm(
    x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, ids = x if isinstance(x, Parts) else (x, None)
    return norm.add_rms_norm(rows, residual, weight, eps, ids)


def _add_rms_norm_fp8(
    x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float, plain: Tensor | None = None
) -> tuple[Pair, Tensor]:
    rows, ids = x if isinstance(x, Parts) else (x, None)
    return norm.add_rms_norm_fp8(rows, residual, weight, eps, plain, ids)


FP8_PRODUCERS = producers(
    FP8_INPUT,
    quantize=fp8_triton.quantize,
    silu_and_mul=fp8_triton.silu_and_mul,
    rms_norm=norm.rms_norm_fp8,
    add_rms_norm=_add_rms_norm_fp8,
)
