"""Int8 format: one float32 scale per weight row and per activation token, both symmetric.

Activations are quantised on the fly. ``scale`` always multiplies: value = stored * scale. Codes are
-127 to 127; -128 can be read but is never produced.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127.0  #: largest code
TINY = 1e-10  #: smallest absolute maximum of a row


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 x [R, K] in place to whole numbers; return them and scales [R, 1]."""
    scales = x.abs().amax(-1, keepdim=True).clamp_(min=TINY).div_(INT8_MAX)
    return x.div_(scales).round_().clamp_(-INT8_MAX, INT8_MAX), scales


def _float32_copy(x: Tensor) -> Tensor:
    """Return a float32 copy of x, also of a float32 x."""
    return x.to(torch.float32, copy=True)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [T, K] to int8 [T, K] and float32 scales [T].

    The largest value of a token becomes 127 or -127.
    """
    if not x.numel():
        return x.to(torch.int8), torch.zeros(x.shape[0], device=x.device)
    values, scales = _quantize_rows(_float32_copy(x))
    return values.to(torch.int8), scales.squeeze(-1)


#: quantisation of a weight [N, K] to int8 [N, K] and float32 scales [N]
quantize_weight = quantize_tokens


def fake_quantize_tokens(x: Tensor) -> Tensor:
    """Return the values that :func:`quantize_tokens` stores for x [T, K], in x's dtype."""
    if not x.numel():
        return x
    values, scales = _quantize_rows(_float32_copy(x))
    return values.mul_(scales).to(x.dtype)


def dequantize(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise stored int8 [..., N, K] with scales [..., N] to [..., N, K] in ``dtype``."""
    return stored.float().mul_(scales.float().unsqueeze(-1)).to(dtype)


def scaled_mm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Compute x weight^T of int8 operands in plain torch, float32 [T, N].

    Sums are exact (int32, or float64 on devices without an integer GEMM) and scaled once.

    Args:
        x: int8 [T, K]
        x_scales: [T]
        weight: int8 [N, K]
        weight_scales: [N]
    """
    # NOTE: torch 2.13's integer GEMM reads past the end of a transposed weight of depth 1 on some
    # processors.
    if x.is_cpu and x.numel() and weight.numel() and x.shape[1] > 1:
        total = torch._int_mm(x, weight.t()).float()
    else:
        total = (x.double() @ weight.double().t()).float()
    return total * x_scales.float()[:, None] * weight_scales.float()[None, :]
