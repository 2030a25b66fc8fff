"""Runtime of ``ops.torch``: the torch references as the table of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import OpsOptions
from glowplug.core.protocols import Quantized, Route, RouteSettingReady, Worker
from glowplug.kernels.elementwise import (
    activation_reference,
    norm_reference,
    rope_reference,
)
from glowplug.kernels.formats import fp8
from glowplug.kernels.moe import route_reference

#: input format: activations rounded to FP8 values, in the compute dtype
FP8_VALUES = "fp8_group128_values"
ROPE_MARGIN = 64  #: rows of the rope table beyond the context, for positions of draft tokens


class TorchOps:
    """``Ops`` (norms, activation, gate, rotary embedding) of one rank, in plain torch."""

    def __init__(self, options: OpsOptions, plan: EnginePlan, worker: Worker) -> None:
        self._device = worker.device
        self.rms_norm = norm_reference.rms_norm
        self.add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = norm_reference.add_rms_norm
        self.adds_parts = False
        self.silu_and_mul = activation_reference.silu_and_mul
        self.topk_softmax = route_reference.topk_softmax
        self.topk_sigmoid = route_reference.topk_sigmoid
        self.route: Route | None = None
        self.route_and_set_ready: RouteSettingReady | None = None
        self.fused: Mapping[tuple[str, str], Callable[..., Any]] = {
            ("cast", FP8_VALUES): _fp8_values,
            ("rms_norm", FP8_VALUES): _rms_norm_fp8,
            ("add_rms_norm", FP8_VALUES): _add_rms_norm_fp8,
            ("silu_and_mul", FP8_VALUES): _silu_and_mul_fp8,
        }

    def rope_table(
        self,
        dim: int,
        context: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_positions: int,
    ) -> Tensor:
        frequencies, factor = rope_reference.inverse_frequencies(
            dim, theta, scaling, max_positions, context
        )
        return rope_reference.cos_sin_table(frequencies, factor, context + ROPE_MARGIN).to(
            self._device
        )

    def rope_at(self, table: Tensor, positions: Tensor, interleaved: bool) -> object:
        return rope_reference.prepare(table.index_select(0, positions), interleaved)

    def rope(self, q: Tensor, k: Tensor, at: object) -> tuple[Tensor, Tensor]:
        assert isinstance(at, tuple)
        return rope_reference.rotate(q, at), rope_reference.rotate(k, at)


def _fp8_values(x: Tensor) -> Quantized:
    return Quantized(fp8.fake_quantize_tokens(x))


def _rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    return Quantized(fp8.rms_norm_rounded(x, weight, eps))


def _add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Quantized, Tensor]:
    residual = residual + x
    return Quantized(fp8.rms_norm_rounded(residual, weight, eps)), residual


def _silu_and_mul_fp8(x: Tensor) -> Quantized:
    return Quantized(fp8.silu_and_mul_rounded(x))
