"""What hands over activations in ``int8_token``: int8 with one float32 scale a token."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from glowplug.core.layers.linear import Both, both_formats
from glowplug.core.protocols import Parts, Quantized
from glowplug.kernels.triton import int8_quant
from glowplug.kernels.triton.moe_sum import moe_sum

INT8 = "int8_token"


def _summed(x: Tensor | Parts) -> Tensor:
    return moe_sum(x.rows, x.ids) if isinstance(x, Parts) else x


def _cast(x: Tensor) -> Quantized:
    return Quantized(*int8_quant.quantize(x))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    return Quantized(*int8_quant.rms_norm(x, weight, eps))


def _add_rms_norm(x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    normed, total = int8_quant.add_rms_norm(_summed(x), residual, weight, eps)
    return Quantized(*normed), total


def _rms_norm_both(x: Tensor, weight: Tensor, eps: float) -> Both:
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Both(plain, Quantized(*int8_quant.rms_norm(x, weight, eps, plain)))


def _add_rms_norm_both(x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float) -> tuple[Both, Tensor]:
    plain = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    normed, total = int8_quant.add_rms_norm(_summed(x), residual, weight, eps, plain)
    return Both(plain, Quantized(*normed)), total


def _silu_and_mul(x: Tensor) -> Quantized:
    return Quantized(*int8_quant.silu_and_mul(x))


PRODUCERS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("cast", INT8): _cast, ("rms_norm", INT8): _rms_norm, ("add_rms_norm", INT8): _add_rms_norm,
    ("silu_and_mul", INT8): _silu_and_mul, ("rms_norm", both_formats(INT8)): _rms_norm_both,
    ("add_rms_norm", both_formats(INT8)): _add_rms_norm_both,
}
