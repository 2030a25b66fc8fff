"""Gated activations on plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.kernels.elementwise import cpu_small


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up [..., I] for x [..., 2I], gate first."""
    if cpu_small.is_few(x) and x.dim() == 2:
        return torch.from_numpy(cpu_small.silu_and_mul(x.numpy()))
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])
