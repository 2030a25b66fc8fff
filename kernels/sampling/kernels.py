"""Token choice from logits in a few passes, by the rules of ``kernels.sampling.reference``.

There is no sort and no host synchronisation. A pass divides each row into blocks of the vocabulary,
one program per block. The last program of a row to finish combines the results of the blocks in
order, so a result depends on its row alone. Shapes: N rows, V vocabulary, B blocks per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.sampling import edits as sampling_edits
from glowplug.kernels.sampling.edits import RowEdits

BLOCK = 2048  #: vocabulary entries per program; equal for every batch, since sums depend on it
LIST_CHUNK = 64  #: listed tokens processed together
PIVOTS = 16  #: thresholds of a pass
#: log2 of the distance between the thresholds of each pass, in float32 bits; weights are at most 1,
#: whose bits are below 2^30
SHIFTS = (26, 22, 18, 14, 10, 6, 2, 0)

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-53)


class RowParameters(NamedTuple):
    """Columns [R] of the sequence table, each possibly strided.

    ``seed`` and ``top_k`` are int64, the others float32.
    """

    temperature: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor


class RowChoice(NamedTuple):
    """Chosen tokens of N rows.

    Attributes:
        tokens: int64 [N]: the most likely token
        peaks: float32 [N]: its logit
        bad: bool [N]: that logit is not finite
        least: int32 [N]: bits of the cut-off, a float32; 0: none yet
    """

    tokens: Tensor
    peaks: Tensor
    bad: Tensor
    least: Tensor


@triton.jit
def finished(arrived, row, blocks):
    """Return whether this is the last program of ``row`` to finish.

    If so, the stores of the others are visible to it, and the counter is reset to zero.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == blocks - 1
    if last:
        tl.store(arrived + row, 0)
    return last


@triton.jit
def _mix(x):
    """Apply the finaliser of SplitMix64, as ``kernels.sampling.reference.mix64`` does."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return float64 in [0, 1): ``kernels.sampling.reference.uniform`` of stream 0."""
    state = _mix(seed.to(tl.uint64) + GOLDEN)
    state = _mix(state + position.to(tl.uint64) * GOLDEN)
    return (state >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def key_of(value, index):
    """Return an int64 key that orders by value, then by smaller index; NaN is largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # the sum makes -0 equal to 0
    ordered = tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index)


@triton.jit
def _best(
    logits,
    keys,
    arrived,
    tokens,
    peaks,
    bad,
    least,
    vocab,
    stride,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the most likely token of a row."""
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + row.to(tl.int64) * stride
    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
    _best_of_row(
        source,
        value,
        index,
        row,
        block,
        keys,
        arrived,
        tokens,
        peaks,
        bad,
        least,
        vocab,
        blocks,
        BLOCKS,
    )


@triton.jit
def _best_edited(
    logits,
    keys,
    arrived,
    tokens,
    peaks,
    bad,
    least,
    rows,
    positions,
    ahead,
    ahead_stride,
    ahead_count,
    flags,
    min_length,
    added,
    listed,
    repetition,
    frequency,
    presence,
    ids,
    values,
    table,
    int_stride,
    float_stride,
    width,
    vocab,
    stride,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LIST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Edit the logits of a row and find its most likely token."""
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + row.to(tl.int64) * stride
    value = sampling_edits.edited(
        source,
        tl.load(rows + row),
        index,
        block,
        tl.load(positions + row),
        ahead + row * ahead_stride,
        ahead_count,
        flags,
        min_length,
        added,
        listed,
        repetition,
        frequency,
        presence,
        ids,
        values,
        table,
        int_stride,
        float_stride,
        width,
        vocab,
        BLOCK,
        LIST,
    )
    _best_of_row(
        source,
        value,
        index,
        row,
        block,
        keys,
        arrived,
        tokens,
        peaks,
        bad,
        least,
        vocab,
        blocks,
        BLOCKS,
    )


@triton.jit
def _best_of_row(
    source,
    value,
    index,
    row,
    block,
    keys,
    arrived,
    tokens,
    peaks,
    bad,
    least,
    vocab,
    blocks,
    BLOCKS: tl.constexpr,
):
    """Reduce a block to its best key; the last program of the row writes the choice."""
    tl.store(keys + row * blocks + block, tl.max(key_of(value, index)))
    if finished(arrived, row, blocks):
        each = tl.arange(0, BLOCKS)
        found = tl.max(
            tl.load(
                keys + row * blocks + each,
                mask=each < blocks,
                other=-0x7FFFFFFFFFFFFFFF,
                cache_modifier=".cg",
            )
        )
        token = tl.minimum(0x7FFFFFFF - (found & 0xFFFFFFFF), vocab - 1)
        peak = tl.load(source + token, cache_modifier=".cg")  # another program may have edited it
        tl.store(tokens + row, token)
        tl.store(peaks + row, peak)
        tl.store(bad + row, (peak - peak) != 0)
        tl.store(least + row, 0)


@triton.jit
def _weights(source, index, vocab, peak, temperature, min_p, least):
    """Return exp((logit - peak) / temperature), or 0 where it is below either cut-off."""
    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
    weight = tl.exp((value - peak) / temperature)
    return tl.where((weight < min_p) | (weight < least) | (index >= vocab), 0.0, weight)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _shares(
    parts,
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
    """Store the share of a block at or above each of PIVOTS + 1 thresholds in ``parts``.

    Bit j of ``held`` is set if part of the block is between threshold j and the next.
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
    tl.store(parts + place * (PIVOTS + 1) + each, part)
    tl.store(parts + place * (PIVOTS + 1) + PIVOTS, beyond)
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
    parts,
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
    """Raise ``low`` by the next four bits of the search.

    ``low`` holds the bits of the largest weight known to leave enough. A block without weights in
    the remaining search interval is not read again.
    """
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
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
            weight = _weights(
                source,
                index,
                vocab,
                tl.load(peaks + row),
                temperature,
                tl.load(min_ps + state * min_p_stride),
                cut,
            )
            _shares(parts, held, place, weight, index, vocab, start, shift, COUNT, PIVOTS)
        else:
            above = tl.load(parts + place * (PIVOTS + 1) + step + 1)
            tl.debug_barrier()
            tl.store(
                parts + place * (PIVOTS + 1) + tl.arange(0, PIVOTS),
                tl.zeros((PIVOTS,), tl.float32) + above,
            )
            tl.store(parts + place * (PIVOTS + 1) + PIVOTS, above)
            tl.store(held + place, 0)
        if finished(arrived, row, blocks):
            total = _totals(parts, row, blocks, BLOCKS, PIVOTS)
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
def _totals(parts, row, blocks, BLOCKS: tl.constexpr, PIVOTS: tl.constexpr):
    """Return float64 [PIVOTS]: the sums over all blocks of a row."""
    each = tl.arange(0, BLOCKS)
    found = tl.load(
        parts + (row * blocks + each)[:, None] * (PIVOTS + 1) + tl.arange(0, PIVOTS)[None, :],
        mask=(each < blocks)[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return tl.sum(found.to(tl.float64), 0)


@triton.jit
def _first_above(weight, cumulative, target, SIZE: tl.constexpr):
    """Return the first position with a positive weight and a cumulative sum above ``target``.

    The position is at most SIZE - 1.
    """
    at = tl.arange(0, SIZE)
    return tl.minimum(tl.min(tl.where((cumulative > target) & (weight > 0), at, SIZE)), SIZE - 1)


@triton.jit
def _draw(
    logits,
    rows,
    positions,
    tokens,
    peaks,
    least,
    masses,
    arrived,
    temperatures,
    temperature_stride,
    min_ps,
    min_p_stride,
    seeds,
    seed_stride,
    vocab,
    stride,
    blocks,
    coldest,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum the weights of a block; the last program of the row draws a token."""
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows + row)
    temperature = tl.load(temperatures + state * temperature_stride)
    if temperature >= coldest:
        source = logits + row.to(tl.int64) * stride
        peak, min_p = tl.load(peaks + row), tl.load(min_ps + state * min_p_stride)
        cut = tl.load(least + row).to(tl.float32, bitcast=True)
        weight = _weights(
            source, block * BLOCK + tl.arange(0, BLOCK), vocab, peak, temperature, min_p, cut
        )
        tl.store(masses + row * blocks + block, tl.sum(weight.to(tl.float64)))
        if finished(arrived, row, blocks):
            each = tl.arange(0, BLOCKS)
            mass = tl.load(
                masses + row * blocks + each, mask=each < blocks, other=0.0, cache_modifier=".cg"
            )
            cumulative = tl.cumsum(mass, 0)
            total = tl.max(cumulative)
            uniform = _uniform(tl.load(seeds + state * seed_stride), tl.load(positions + row))
            target = tl.minimum(uniform * total, total * BELOW_ONE)
            chosen = _first_above(mass, cumulative, target, BLOCKS)
            before = tl.max(tl.where(each < chosen, cumulative, 0.0))
            weight = _weights(
                source, chosen * BLOCK + tl.arange(0, BLOCK), vocab, peak, temperature, min_p, cut
            )
            inside = tl.cumsum(weight.to(tl.float64), 0)
            target = tl.minimum(target - before, tl.max(inside) * BELOW_ONE)
            token = chosen * BLOCK + _first_above(weight, inside, target, BLOCK)
            tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


class Grid(NamedTuple):
    """Launch grid and sizes of a pass over ``logits`` [N, V]."""

    programs: tuple[int, int]  #: N, B
    sizes: tuple[int, int, int]  #: V, stride between rows, B
    blocks: int  #: B rounded up to a power of two

    @classmethod
    def over(cls, logits: Tensor) -> Grid:
        """Return the grid for ``logits``."""
        blocks = cdiv(logits.shape[1], BLOCK)
        return cls(
            (logits.shape[0], blocks),
            (logits.shape[1], logits.stride(0), blocks),
            max(2, next_power_of_2(blocks)),
        )


def best(logits: Tensor, arrived: Tensor) -> RowChoice:
    """Choose the most likely token of each row.

    Args:
        logits: float32 [N, V]; rows may be strided
        arrived: int32 [N or more], zeros before and after
    """
    grid = Grid.over(logits)
    choice = _choice(logits)
    if len(logits):
        keys = torch.empty(grid.programs, dtype=torch.int64, device=logits.device)
        _best[grid.programs](
            logits,
            keys,
            arrived,
            *choice,
            *grid.sizes,
            BLOCK=BLOCK,
            BLOCKS=grid.blocks,
            **dependent.options(),
        )
    return choice


def best_edited(
    logits: Tensor,
    arrived: Tensor,
    rows: Tensor,
    positions: Tensor,
    ahead: Tensor | None,
    edits: RowEdits,
) -> RowChoice:
    """Edit logits in place and choose the most likely token of each row.

    Args:
        logits: float32 [N, V]; rows may be strided
        arrived: int32 [N or more], zeros before and after
        rows: int64 [N], rows of the sequence table
        positions: int64 [N]
        ahead: int64 [N, W - 1]: tokens that penalties count although they were not observed yet;
            -1: none
        edits: edits of the rows
    """
    grid = Grid.over(logits)
    choice = _choice(logits)
    if len(logits):
        keys = torch.empty(grid.programs, dtype=torch.int64, device=logits.device)
        count = 0 if ahead is None else ahead.shape[1]
        # NOTE: without fusion, each product and sum is rounded as in torch, so that ties are equal.
        _best_edited[grid.programs](
            logits,
            keys,
            arrived,
            *choice,
            rows,
            positions,
            rows if ahead is None else ahead,
            0 if ahead is None else ahead.stride(0),
            count,
            *edits,
            *edits.strides,
            *grid.sizes,
            BLOCK=BLOCK,
            BLOCKS=grid.blocks,
            LIST=LIST_CHUNK,
            enable_fp_fusion=False,
            **dependent.options(),
        )
    return choice


def _choice(logits: Tensor) -> RowChoice:
    """Allocate a choice for the rows of ``logits``."""
    rows = logits.shape[0]
    device = logits.device
    return RowChoice(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )


def cut_off(
    logits: Tensor,
    choice: RowChoice,
    rows: Tensor,
    parameters: RowParameters,
    coldest: float,
    count: bool,
    arrived: Tensor,
) -> None:
    """Set ``choice.least`` by top-k (``count``), or by top-p of what top-k left.

    Equal weights survive together. Rows colder than ``coldest`` are greedy and not changed, nor are
    rows whose limit is off.
    """
    grid = Grid.over(logits)
    device = logits.device
    low, steps = (torch.empty(len(rows), dtype=torch.int32, device=device) for _ in range(2))
    goals = torch.empty(len(rows), dtype=torch.float64, device=device)
    parts = torch.empty(*grid.programs, PIVOTS + 1, device=device)
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
            parts,
            held,
            arrived,
            *_columns(parameters, limits),
            *grid.sizes,
            shift,
            coldest,
            FIRST=shift == SHIFTS[0],
            COUNT=count,
            BLOCK=BLOCK,
            BLOCKS=grid.blocks,
            PIVOTS=PIVOTS,
            **dependent.options(),
        )


def draw(
    logits: Tensor,
    choice: RowChoice,
    rows: Tensor,
    positions: Tensor,
    parameters: RowParameters,
    coldest: float,
    arrived: Tensor,
) -> None:
    """Replace ``choice.tokens`` of the rows that are not greedy by a draw.

    The draw uses the uniform of (seed, position).
    """
    grid = Grid.over(logits)
    if len(rows):
        masses = torch.empty(grid.programs, dtype=torch.float64, device=logits.device)
        _draw[grid.programs](
            logits,
            rows,
            positions,
            choice.tokens,
            choice.peaks,
            choice.least,
            masses,
            arrived,
            *_columns(parameters, parameters.seed),
            *grid.sizes,
            coldest,
            BLOCK=BLOCK,
            BLOCKS=grid.blocks,
            **dependent.options(),
        )


def _columns(parameters: RowParameters, last: Tensor) -> tuple[Tensor | int, ...]:
    """Return temperature, min-p and the column ``last``, each followed by its stride."""
    each = (parameters.temperature, parameters.min_p, last)
    return tuple(value for column in each for value in (column, column.stride(0)))
