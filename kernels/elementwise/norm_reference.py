"""Root-mean-square normalisation (Zhang and Sennrich, 2019), also with a residual add before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.kernels.elementwise import cpu_small


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight in x's dtype, computed in float32.

    x is [..., N], weight is [N].
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, summed in float32; x [..., N], weight [N]."""
    if cpu_small.is_few(x):
        return torch.from_numpy(cpu_small.rms_norm(x.numpy(), weight.numpy(), eps))
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(residual + x), residual + x) for x and residual [..., N] and weight [N]."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
