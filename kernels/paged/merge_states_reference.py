"""Merge of attention results over disjoint sets of keys, by the log-sum-exp of their scores.

From FlashInfer (arXiv 2501.01005). A partial state is ``(out, lse)``: ``out`` is attention over one
set of keys, normalised within the set, and ``lse`` is the natural logarithm of the sum of its
exponentiated scores. States merge in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two partial states.

    A state over no keys has ``lse == -inf`` and any ``out``, NaN included; it adds nothing. Two
    such states give zeros and ``-inf``.

    Args:
        out_a: float32 [..., D], not modified
        lse_a: float32 [...], not modified
        out_b: as ``out_a``, of the second state
        lse_b: as ``lse_a``, of the second state

    Returns:
        ``out`` float32 [..., D] and ``lse`` float32 [...]
    """
    lse = torch.logaddexp(lse_a, lse_b)
    return _weighted(out_a, lse_a, lse) + _weighted(out_b, lse_b, lse), lse


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial state into another in place.

    Args:
        out: float32 [T, H, D], overwritten
        lse: float32 [T, H], overwritten
        part: [T, H, D] of any floating dtype
        part_lse: [T, H]
    """
    merged = merge_states(out, lse, part.float(), part_lse)
    out.copy_(merged[0])
    lse.copy_(merged[1])


def _weighted(out: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    """Return ``out`` times its share of the merged state; an empty state gives zeros."""
    empty = torch.isneginf(lse)
    weight = torch.exp(lse - total).masked_fill(empty, 0.0)
    return out.masked_fill(empty.unsqueeze(-1), 0.0) * weight.unsqueeze(-1)


def merge_states_reference(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge S stacked states at once by the definition, in float64.

    ``outs`` [S, ..., D] and ``lses`` [S, ...] must be finite.
    """
    weights = torch.softmax(lses.double(), dim=0)
    return (outs.double() * weights.unsqueeze(-1)).sum(dim=0), torch.logsumexp(lses.double(), dim=0)
