"""Newest tokens of decoding rows, kept on a GPU until their entries are written to a draft's cache.

``pending_entries_reference`` defines the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.speculation.pending_entries_reference import Pending

BLOCK_MAX = 1024  #: elements of a hidden state that one program copies


@triton.jit
def _keep(
    rows,
    last,
    state,
    positions,
    kv_slots,
    kept,
    hidden,
    capacity,
    rounds,
    size,
    BLOCK: tl.constexpr,
):
    """Keep the newest token of one row, and BLOCK elements of the hidden state before it."""
    place, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place)
    position = tl.load(positions + place)
    at = position % rounds * tl.num_programs(0) + place
    if part == 0:
        tl.store(kept + at, tl.load(last + row))
        tl.store(kept + capacity + at, position)
        tl.store(kept + 2 * capacity + at, tl.load(kv_slots + place))
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(state + row * size + column, mask=inside)
    tl.store(hidden + at * size + column, value, mask=inside)


def keep_newest(
    pending: Pending,
    rows: Tensor,
    last: Tensor,
    state: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
) -> None:
    """Keep the newest token of each row; arguments as in ``pending_entries_reference``."""
    capacity, size = pending.hidden.shape
    count = len(rows)
    if not count:
        return
    block = min(BLOCK_MAX, next_power_of_2(size))
    _keep[(count, cdiv(size, block))](
        rows,
        last,
        state,
        positions,
        kv_slots,
        pending.tokens,
        pending.hidden,
        capacity,
        capacity // count,
        size,
        BLOCK=block,
    )
