"""Newest tokens of decoding rows, kept until their entries are written to a draft's cache.

D is the number of decoding rows, and C the number of tokens that can be kept: those of C // D
consecutive steps of the same rows, each of which gains one token. The token at position p of row i
of the step is kept at place (p mod (C // D)) * D + i, so that the steps need no counter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pending(NamedTuple):
    """The kept tokens.

    Attributes:
        tokens: their ids, positions and KV slots, int64 [3, C].
        hidden: the target's hidden states of the tokens before them, [C, H].
    """

    tokens: Tensor
    hidden: Tensor


def keep_newest(
    pending: Pending,
    rows: Tensor,
    last: Tensor,
    state: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
) -> None:
    """Keep the newest token of each row.

    Args:
        pending: the kept tokens.
        rows: rows of the sequence table, int64 [D].
        last: newest token of each row of the table, int64 [R].
        state: the target's hidden state of the token before it, [R, H].
        positions: positions of the newest tokens, int64 [D].
        kv_slots: their KV slots, int64 [D].
    """
    count = len(rows)
    rounds = len(pending.hidden) // count
    at = positions % rounds * count + torch.arange(count, device=rows.device)
    pending.tokens[:, at] = torch.stack([last[rows], positions, kv_slots])
    pending.hidden[at] = state[rows].to(pending.hidden.dtype)
