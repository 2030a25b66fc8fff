"""Places of the tokens of decoding rows: those of draft passes and of the target's step.

The host has only upper bounds of the rows' lengths; the exact ones are on the device. R is the
number of rows of the sequence table, D that of decoding rows, W the tokens that each of them
computes, and S the number of draft passes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PassPlaces(NamedTuple):
    """The places of the tokens of all draft passes, one of each row in each pass.

    Attributes:
        positions: int64 [S, D].
        kv_slots: int64 [S, D].
        kv_lens: lengths of the rows after each pass, int32 [S, D].
        query_starts: 0 to D, int32 [D + 1].
    """

    positions: Tensor
    kv_slots: Tensor
    kv_lens: Tensor
    query_starts: Tensor


def slots_at(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return the KV slots of ``positions`` [D, W] in rows of ``page_table`` [D, P].

    Positions behind the table's last column are in the scratch page.
    """
    columns = positions // page_size
    beyond = columns >= page_table.shape[1]
    pages = page_table.long().gather(1, columns.masked_fill(beyond, 0)).masked_fill(beyond, 0)
    return pages * page_size + positions % page_size


def place_chains(
    rows: Tensor,
    computed: Tensor,
    page_table: Tensor,
    page_size: int,
    positions: Tensor,
    kv_slots: Tensor,
    kv_lens: Tensor,
    passes: int,
) -> PassPlaces:
    """Set the places of the tokens of decoding rows, and return those of the draft passes before.

    Args:
        rows: int64 [D], rows of the sequence table.
        computed: int32 [R], number of tokens of each row in the target's cache.
        page_table: int32 [D, P], with contiguous rows.
        page_size: tokens per page.
        positions: int64 [D * W], set.
        kv_slots: int64 [D * W], set.
        kv_lens: int32 [D], upper bounds of the lengths after the step; set to these lengths.
        passes: S.
    """
    count = len(rows)
    width = len(positions) // max(count, 1)
    lengths = torch.minimum(computed[rows], kv_lens - width).long()
    own = lengths[:, None] + torch.arange(width)
    positions.copy_(own.view(-1))
    kv_slots.copy_(slots_at(page_table, own, page_size).view(-1))
    kv_lens.copy_(lengths + width)
    drafted = lengths[:, None] + torch.arange(passes)
    return PassPlaces(
        drafted.T.contiguous(),
        slots_at(page_table, drafted, page_size).T.contiguous(),
        (drafted + 1).T.int().contiguous(),
        torch.arange(count + 1, dtype=torch.int32),
    )
