"""Ops that return activations in ``int8_token``: int8 with one float32 scale per token."""

from __future__ import annotations

from torch import Tensor

from glowplug.core.protocols import Parts
from glowplug.kernels.formats import int8_triton
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.ops.quantizing import Pair, producers

INT8 = "int8_token"  #: the input format


def _add_rms_norm(
    x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float, plain: Tensor | None = None
) -> tuple[Pair, Tensor]:
    summed = moe_sum(x.rows, x.ids) if isinstance(x, Parts) else x
    return int8_triton.add_rms_norm(summed, residual, weight, eps, plain)


PRODUCERS = producers(
    INT8,
    quantize=int8_triton.quantize,
    silu_and_mul=int8_triton.silu_and_mul,
    rms_norm=int8_triton.rms_norm,
    add_rms_norm=_add_rms_norm,
)
