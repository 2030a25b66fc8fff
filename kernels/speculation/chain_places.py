"""Places of the tokens of decoding rows on a GPU: those of draft passes and of the target's step.

One launch replaces about ten small operations for each pass. ``chain_places_reference`` defines the
result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.speculation.chain_places_reference import PassPlaces

#: the room for a pass's rows is a multiple of this, so that the fields of each pass begin at a
#: multiple of 16 bytes: for other addresses Triton would compile attention while requests wait
ALIGNED = 4


@triton.jit
def _slots(table, columns, positions, page_size, mask):
    """Return the KV slots of ``positions`` of a row; behind its table, of the scratch page."""
    column = positions // page_size
    inside = mask & (column < columns)
    page = tl.load(table + column, mask=inside, other=0).to(tl.int64)
    return page * page_size + positions % page_size


@triton.jit(do_not_specialize=["stride"])
def _place(
    rows,
    computed,
    table,
    table_stride,
    columns,
    page_size,
    width,
    passes,
    positions,
    kv_slots,
    kv_lens,
    pass_positions,
    pass_slots,
    pass_lens,
    query_starts,
    stride,
    WIDTH: tl.constexpr,
):
    """Place the tokens of one row; WIDTH is a power of two above ``width`` and ``passes``."""
    place = tl.program_id(0)
    count = tl.num_programs(0)
    length = tl.minimum(
        tl.load(computed + tl.load(rows + place)), tl.load(kv_lens + place) - width
    ).to(tl.int64)
    own = table + place.to(tl.int64) * table_stride
    number = tl.arange(0, WIDTH)
    position = length + number
    slot = _slots(own, columns, position, page_size, number < WIDTH)
    inside = number < width
    tl.store(positions + place * width + number, position, mask=inside)
    tl.store(kv_slots + place * width + number, slot, mask=inside)
    tl.store(kv_lens + place, (length + width).to(tl.int32))
    drafted = number < passes
    at = number * stride + place
    tl.store(pass_positions + at, position, mask=drafted)
    tl.store(pass_slots + at, slot, mask=drafted)
    tl.store(pass_lens + at, (position + 1).to(tl.int32), mask=drafted)
    tl.store(query_starts + place, place)
    if place == count - 1:
        tl.store(query_starts + count, count)


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

    Arguments and result as in ``chain_places_reference``.
    """
    count = len(rows)
    width = len(positions) // max(count, 1)
    device = rows.device
    stride = cdiv(count, ALIGNED) * ALIGNED
    places = torch.empty(2, passes, stride, dtype=torch.int64, device=device)[..., :count]
    lengths = torch.empty(passes, stride, dtype=torch.int32, device=device)[:, :count]
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    made = PassPlaces(places[0], places[1], lengths, starts)
    if count:
        _place[(count,)](
            rows,
            computed,
            page_table,
            page_table.stride(0),
            page_table.shape[1],
            page_size,
            width,
            passes,
            positions,
            kv_slots,
            kv_lens,
            *made,
            stride,
            WIDTH=next_power_of_2(max(width, passes)),
        )
    return made
