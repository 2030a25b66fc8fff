"""Sums whose order is fixed."""
from __future__ import annotations

from torch import Tensor


def add_up(parts: Tensor) -> Tensor:
    """[N, ...] -> [...], in order; floats in float32."""
    total = parts[0].float() if parts.is_floating_point() else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
