"""Reshaping of tensors for kernels that process rows."""

from __future__ import annotations

from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., N] as [rows, N] with a contiguous last dimension; rows may be strided."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()
