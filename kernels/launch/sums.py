"""Sums in a fixed order."""

from __future__ import annotations

from torch import Tensor


def add_pairs(rows: Tensor, ids: Tensor) -> Tensor:
    """Sum the K rows of each token in float32; rows with negative ids are left out.

    rows [T * K, N] and ids [T, K] give [T, N] in the dtype of rows.
    """
    return sum_of_pairs(rows.view(*ids.shape, rows.shape[1]), ids).to(rows.dtype)


def sum_of_pairs(rows: Tensor, ids: Tensor) -> Tensor:
    """Sum the K rows of each token; rows with negative ids are left out.

    rows [T, K, N] and ids [T, K] give float32 [T, N].
    """
    return rows.float().masked_fill((ids < 0).unsqueeze(-1), 0.0).sum(1)


def add_up(addends: Tensor) -> Tensor:
    """Sum addends [N, ...] over N, in order, to [...]; floats are summed in float32."""
    total = addends[0].float() if addends.is_floating_point() else addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total
