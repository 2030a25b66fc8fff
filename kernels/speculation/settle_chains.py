"""The end of a step over chains of drafts on a GPU: acceptance, and the rows' new states.

One launch replaces about forty small operations, which take 0.1 ms in a captured step of one row.
``settle_chains_reference`` defines the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.speculation.settle_chains_reference import ChainStep, RowStates, Settled

BLOCK_MAX = 1024  #: elements of a hidden state that one program copies


@triton.jit
def _settle(
    fed,
    drawn,
    bad,
    rows,
    positions,
    kv_slots,
    hidden,
    hidden_stride,
    last,
    state,
    computed,
    page_ends,
    counts,
    row_bad,
    lacking_tokens,
    lacking_positions,
    lacking_slots,
    lacking_hidden,
    context,
    page_size,
    size,
    WIDTH: tl.constexpr,
    WIDTH_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Settle one row; each program of the second axis copies BLOCK elements of hidden states."""
    place, part = tl.program_id(0), tl.program_id(1)
    first = place * WIDTH
    number = tl.arange(0, WIDTH_SIZE)
    inside = number < WIDTH
    token = tl.load(drawn + first + number, mask=inside, other=0)
    draft = tl.load(fed + first + number + 1, mask=number < WIDTH - 1, other=-1)
    # the first place whose draft is not the drawn token, at the latest the last one
    unlike = tl.where((number < WIDTH - 1) & (token == draft), WIDTH, number)
    end = tl.min(unlike, 0)
    row = tl.load(rows + place)
    begin = tl.load(positions + first)
    if part == 0:
        tl.store(counts + place, end + 1)
        flags = tl.load(bad + first + number, mask=number <= end, other=0)
        tl.store(row_bad + place, tl.max(flags.to(tl.int32), 0) > 0)
        tl.store(last + row, tl.sum(tl.where(number == end, token, 0), 0))
        tl.store(computed + row, tl.minimum(begin + end + 1, context).to(tl.int32))
        at = place * (WIDTH - 1) + number
        lacking = number < WIDTH - 1
        slot = tl.load(kv_slots + first + number + 1, mask=lacking, other=0)
        tl.store(lacking_tokens + at, token, mask=lacking)
        tl.store(lacking_positions + at, begin + number + 1, mask=lacking)
        tl.store(lacking_slots + at, slot, mask=lacking)
    column = part * BLOCK + tl.arange(0, BLOCK)
    copied = column < size
    for step in tl.static_range(WIDTH):
        source = hidden + (first + step).to(tl.int64) * hidden_stride
        value = tl.load(source + column, mask=copied)
        if step < WIDTH - 1:
            target = (place * (WIDTH - 1) + step).to(tl.int64) * size
            tl.store(lacking_hidden + target + column, value, mask=copied)
        newest = column < tl.where(end == step, size, 0)
        tl.store(state + row * size + column, value, mask=newest)
        slot = tl.load(kv_slots + first + step)
        offset = tl.load(positions + first + step) % page_size
        ended = column < tl.where(offset == page_size - 1, size, 0)
        tl.store(page_ends + slot // page_size * size + column, value, mask=ended)


def settle_chains(step: ChainStep, states: RowStates, page_size: int, context: int) -> Settled:
    """Accept the drafts that equal the drawn tokens, and store the states of rows and pages.

    Arguments and result as in ``settle_chains_reference``.
    """
    count, width = step.fed.shape
    size = step.hidden.shape[1]
    device = step.fed.device
    lacking = count * (width - 1)
    tokens, positions, kv_slots = torch.empty(3, lacking, dtype=torch.int64, device=device)
    made = Settled(
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.bool, device=device),
        tokens,
        positions,
        kv_slots,
        torch.empty(lacking, size, dtype=step.hidden.dtype, device=device),
    )
    assert step.hidden.stride(1) == 1 and step.fed.is_contiguous() and step.drawn.is_contiguous()
    if count:
        block = min(BLOCK_MAX, next_power_of_2(size))
        _settle[(count, cdiv(size, block))](
            step.fed,
            step.drawn,
            step.bad,
            step.rows,
            step.positions,
            step.kv_slots,
            step.hidden,
            step.hidden.stride(0),
            *states,
            *made,
            context,
            page_size,
            size,
            WIDTH=width,
            WIDTH_SIZE=next_power_of_2(width),
            BLOCK=block,
        )
    return made
