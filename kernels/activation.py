"""Gated activations."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2I], gate then up -> silu(gate) * up [..., I]."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])
