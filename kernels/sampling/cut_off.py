"""Cut-offs of sampling weights by top-k and top-p, as ``kernels.sampling.reference`` makes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.sampling.vocabulary_blocks import (
    Grid,
    RowChoice,
    RowParameters,
    columns_of,
    finished,
    weights_of,
)

PIVOTS = 16  #: thresholds that a pass compares the weights with
#: log2 of the distance between the thresholds of each pass, in float32 bits; weights are at most 1,
#: whose bits are below 2^30
SHIFTS = (26, 22, 18, 14, 10, 6, 2, 0)


@triton.jit
def _either(a, b):
    """Return the union of two bit sets; combines the values of a reduction."""
    return a | b


@triton.jit
def _shares(
    shares,
    held,
    place,
    weight,
    index,
    vocab,
    start,
    shift,
    COUNT: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Store the sum of a block's weights at or above each of PIVOTS + 1 thresholds in ``shares``.

    With ``COUNT`` weights count 1 each. Bit j of ``held`` is set if the block has a weight between
    threshold j and the next.
    """
    bits = weight.to(tl.int32, bitcast=True)
    inside = (bits >= start) & (index < vocab)
    worth = tl.where(inside, 1.0, 0.0) if COUNT else tl.where(inside, weight, 0.0)
    each, part = tl.arange(0, PIVOTS), tl.zeros((PIVOTS,), tl.float32) + tl.sum(worth)
    beyond = tl.sum(tl.where(bits >= start + (PIVOTS << shift), worth, 0.0))
    step = (bits - start) >> shift
    between = (worth > 0) & (step < PIVOTS)
    some = tl.reduce(tl.where(between, 1 << tl.where(between, step, 0), 0), 0, _either)
    for pivot in tl.static_range(1, PIVOTS):
        part = tl.where(
            each == pivot, tl.sum(tl.where(bits >= start + (pivot << shift), worth, 0.0)), part
        )
    tl.store(shares + place * (PIVOTS + 1) + each, part)
    tl.store(shares + place * (PIVOTS + 1) + PIVOTS, beyond)
    tl.store(held + place, some)


@triton.jit(do_not_specialize=["shift"])
def _narrow(
    logits,
    rows,
    peaks,
    least,
    low,
    steps,
    goals,
    shares,
    held,
    arrived,
    temperatures,
    temperature_stride,
    min_ps,
    min_p_stride,
    limits,
    limit_stride,
    vocab,
    stride,
    blocks,
    shift,
    coldest,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIVOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the next four bits of a row's cut-off, and add them to ``low``.

    ``low`` holds the bits of the largest weight known to leave enough tokens or probability. A
    block without weights in the remaining search interval is not read again.
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows + row)
    temperature = tl.load(temperatures + state * temperature_stride)
    limit = tl.load(limits + state * limit_stride)
    wanted = (limit > 0) & (limit < vocab) if COUNT else limit < 1
    if wanted & (temperature >= coldest):
        place = row * blocks + block
        start = 0 if FIRST else tl.load(low + row)
        step = 0 if FIRST else tl.load(steps + row)
        some = 1 if FIRST else (tl.load(held + place) >> step) & 1
        if some != 0:
            source = logits + row.to(tl.int64) * stride
            cut = tl.load(least + row).to(tl.float32, bitcast=True)
            index = block * BLOCK + tl.arange(0, BLOCK)
            weight = weights_of(
                source,
                index,
                vocab,
                tl.load(peaks + row),
                temperature,
                tl.load(min_ps + state * min_p_stride),
                cut,
            )
            _shares(shares, held, place, weight, index, vocab, start, shift, COUNT, PIVOTS)
        else:
            above = tl.load(shares + place * (PIVOTS + 1) + step + 1)
            tl.debug_barrier()
            tl.store(
                shares + place * (PIVOTS + 1) + tl.arange(0, PIVOTS),
                tl.zeros((PIVOTS,), tl.float32) + above,
            )
            tl.store(shares + place * (PIVOTS + 1) + PIVOTS, above)
            tl.store(held + place, 0)
        if finished(arrived, row, blocks):
            total = _totals(shares, row, blocks, BLOCKS, PIVOTS)
            if COUNT:
                goal = limit.to(tl.float64)
            elif FIRST:
                goal = limit.to(tl.float64) * tl.max(total)
                tl.store(goals + row, goal)
            else:
                goal = tl.load(goals + row)
            chosen = tl.maximum(tl.sum((total >= goal).to(tl.int32), 0), 1) - 1
            tl.store(steps + row, chosen)
            tl.store(low + row, start + (chosen << shift))
            # later passes may use this cut-off already
            tl.store(least + row, start + (chosen << shift))


@triton.jit
def _totals(shares, row, blocks, BLOCKS: tl.constexpr, PIVOTS: tl.constexpr):
    """Return the sums of ``shares`` over all blocks of a row, float64 [PIVOTS]."""
    each = tl.arange(0, BLOCKS)
    found = tl.load(
        shares + (row * blocks + each)[:, None] * (PIVOTS + 1) + tl.arange(0, PIVOTS)[None, :],
        mask=(each < blocks)[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return tl.sum(found.to(tl.float64), 0)


def cut_off(
    logits: Tensor,
    choice: RowChoice,
    rows: Tensor,
    parameters: RowParameters,
    coldest: float,
    count: bool,
    arrived: Tensor,
) -> None:
    """Raise each row's least weight with which a token may be drawn, as its top-k or top-p demands.

    Call this function for top-k first, then for top-p. Tokens of equal weight are kept or cut
    together. Rows colder than ``coldest`` are greedy. These rows, and rows whose limit is off,
    are not changed.

    Args:
        logits: float32 [N, V]; rows may be strided
        choice: result of ``greedy.best``; ``least`` is overwritten
        rows: int64 [N], rows of the sequence table
        parameters: sampling parameters of the sequence table
        coldest: temperature below which a row is greedy
        count: cut by top-k; otherwise by top-p
        arrived: int32 [N or more], counters of finished programs per row, zeros before and after
    """
    grid = Grid.over(logits)
    device = logits.device
    low = torch.empty_like(choice.least)
    steps = torch.empty_like(choice.least)
    goals = torch.empty(len(rows), dtype=torch.float64, device=device)
    shares = torch.empty(*grid.programs, PIVOTS + 1, device=device)
    held = torch.empty(grid.programs, dtype=torch.int32, device=device)
    limits = parameters.top_k if count else parameters.top_p
    for shift in SHIFTS if len(rows) else ():
        _narrow[grid.programs](
            logits,
            rows,
            choice.peaks,
            choice.least,
            low,
            steps,
            goals,
            shares,
            held,
            arrived,
            *columns_of(parameters, limits),
            *grid.sizes,
            shift,
            coldest,
            FIRST=shift == SHIFTS[0],
            COUNT=count,
            BLOCK=grid.block,
            BLOCKS=grid.blocks,
            PIVOTS=PIVOTS,
            **dependent_launch.options(),
        )
