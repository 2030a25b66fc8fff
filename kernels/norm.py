"""Root-mean-square normalisation (Zhang and Sennrich, 2019), alone and with the residual add before it."""
from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> x / sqrt(mean(x^2) + eps) * weight in x's dtype, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, in few calls; accumulates in float32.

    NOTE: on a CPU torch's own rms_norm is a composite of seven operations, and a small layer is mostly their overhead.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    length = torch.linalg.vector_norm(x, 2, -1, True)
    scale = torch.addcmul(_constant(eps), length, length, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x)."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
