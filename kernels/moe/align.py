"""Alignment of (token, expert) pairs for grouped GEMMs: sorted by expert, padded to whole tiles.

Nothing depends on a value on the host: grids and sizes follow from the shape of the ids alone. The
pairs of an expert are in token order, so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

#: most pairs for a single launch, in which one program per expert reads all ids
ONE_LAUNCH_PAIRS_MAX = 4096
CHUNK_PAIRS = 128  #: pairs per program if there are more


class Alignment(NamedTuple):
    """(Token, expert) pairs sorted by expert. Pair t * K + k is token t's k-th expert.

    Attributes:
        sorted_pairs: int32 [R]: pairs in order of experts; T * K marks padding. Undefined from
            position ``num_padded`` on. R = blocks * ``block_m`` is the most that any routing needs.
        expert_of_block: int32 [blocks]: the expert of each block of ``block_m`` positions, -1
            after the last block.
        num_padded: int32 [1]: number of positions in use, padding included.
        ends: int32 [experts]: the position after each expert's last pair; for an expert
            without pairs, the position at which they would begin.
    """

    sorted_pairs: Tensor
    expert_of_block: Tensor
    num_padded: Tensor
    ends: Tensor


def max_blocks(pairs: int, experts: int, block_m: int) -> int:
    """Return the largest number of blocks that ``pairs`` (token, expert) pairs can fill.

    A block has ``block_m`` rows. The number is valid for any routing to ``experts`` experts.
    """
    return min(pairs, (pairs + experts * (block_m - 1)) // block_m)


@triton.jit
def _fill(
    sorted_pairs,
    expert_of_block,
    num_padded,
    ends,
    padded,
    counts,
    expert,
    pairs,
    blocks,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the padding rows and the blocks of ``expert`` in the lists of an :class:`Alignment`.

    The program of expert 0 also stores ``num_padded`` and marks the unused blocks.

    Returns:
        The expert's first position.
    """
    bins = tl.arange(0, BINS)
    start = tl.sum(tl.where(bins < expert, padded, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    size = tl.sum(tl.where(bins == expert, padded, 0))
    tl.store(ends + expert, start + count)
    lane = tl.arange(0, WIDTH)
    for past in range(0, size - count, WIDTH):
        tl.store(sorted_pairs + start + count + past + lane, pairs, mask=past + lane < size - count)
    first = start // BLOCK_M
    for past in range(0, size // BLOCK_M, WIDTH):
        tl.store(expert_of_block + first + past + lane, expert, mask=past + lane < size // BLOCK_M)
    if expert == 0:
        total = tl.sum(padded)
        tl.store(num_padded, total)
        for past in range(total // BLOCK_M, blocks, WIDTH):
            tl.store(expert_of_block + past + lane, -1, mask=past + lane < blocks)
    return start


@triton.jit
def _load_ids(ids, place, pairs, experts, BINS: tl.constexpr):
    """Load expert ids from index ``place`` on; BINS - 1 replaces ids outside [0, experts)."""
    chosen = tl.load(ids + place, mask=place < pairs, other=-1).to(tl.int32)
    return tl.where((chosen < 0) | (chosen >= experts), BINS - 1, chosen)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _by_expert(
    ids,
    sorted_pairs,
    expert_of_block,
    num_padded,
    ends,
    pairs,
    experts,
    blocks,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sort the pairs and fill all fields of an :class:`Alignment`, with one program per expert."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, SPAN):
        counts += tl.histogram(
            _load_ids(ids, start + tl.arange(0, SPAN), pairs, experts, BINS), BINS
        )
    counts = tl.where(bins < experts, counts, 0)
    padded = (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    place = _fill(
        sorted_pairs,
        expert_of_block,
        num_padded,
        ends,
        padded,
        counts,
        expert,
        pairs,
        blocks,
        BLOCK_M,
        BINS,
        WIDTH,
    )
    for start in range(0, pairs, SPAN):
        pair = start + tl.arange(0, SPAN)
        mine = _load_ids(ids, pair, pairs, experts, BINS) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_pairs + place + rank, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32))


@triton.jit(do_not_specialize=["chunks"])
def _count(
    ids,
    counts,
    pairs,
    experts,
    chunks,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Store in ``counts`` [BINS, chunks] the number of ids of each expert in each chunk."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    chunk = tl.program_id(0)
    found = tl.histogram(
        _load_ids(ids, chunk * SPAN + tl.arange(0, SPAN), pairs, experts, BINS), BINS
    )
    tl.store(counts + tl.arange(0, BINS) * chunks + chunk, found)


@triton.jit
def _scan(counts, totals, chunks, SPAN: tl.constexpr, DEPENDENT: tl.constexpr):
    """Replace counts by their exclusive prefix sums over chunks; store totals int32 [BINS]."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row = counts + tl.program_id(0) * chunks
    total = 0
    for start in range(0, chunks, SPAN):
        chunk = start + tl.arange(0, SPAN)
        found = tl.load(row + chunk, mask=chunk < chunks, other=0)
        tl.store(row + chunk, total + tl.cumsum(found, 0) - found, mask=chunk < chunks)
        total += tl.sum(found)
    tl.store(totals + tl.program_id(0), total)


@triton.jit(do_not_specialize=["chunks", "blocks"])
def _place(
    ids,
    counts,
    totals,
    sorted_pairs,
    expert_of_block,
    num_padded,
    ends,
    pairs,
    experts,
    chunks,
    blocks,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Store the sorted pairs and the other fields of an :class:`Alignment`.

    The first programs handle one chunk of ids each, the others one expert each.
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = tl.load(totals + bins)
    found = tl.where(bins < experts, found, 0)
    padded = (found + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if program >= chunks:
        _fill(
            sorted_pairs,
            expert_of_block,
            num_padded,
            ends,
            padded,
            found,
            program - chunks,
            pairs,
            blocks,
            BLOCK_M,
            BINS,
            WIDTH,
        )
    else:
        starts = tl.cumsum(padded, 0) - padded
        lane = tl.arange(0, SPAN)
        pair = program * SPAN + lane
        chosen = _load_ids(ids, pair, pairs, experts, BINS)
        other = _load_ids(ids, program * SPAN + lane, pairs, experts, BINS)
        earlier = (chosen[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        start = tl.sum(tl.where(chosen[:, None] == bins[None, :], starts[None, :], 0), 1)
        start += tl.load(counts + chosen * chunks + program)
        tl.store(sorted_pairs + start + rank, pair, mask=chosen < experts)


def align(ids: Tensor, experts: int, block_m: int, left_out: int = 0) -> Alignment:
    """Sort (token, expert) pairs by expert, in one launch for few pairs and three for many.

    Args:
        ids: int32 or int64 [T, K]. Ids outside [0, experts) are left out.
        experts: Number of experts.
        block_m: Rows of a tile, any number.
        left_out: Every token has at least this number of ids outside [0, experts), such as those
            of fused shared experts; fewer blocks are then allocated.
    """
    pairs = ids.numel()
    device = ids.device
    blocks = max_blocks(pairs - left_out * ids.shape[0], experts, block_m)
    found = Alignment(
        *(
            torch.empty(size, dtype=torch.int32, device=device)
            for size in (blocks * block_m, blocks, 1, experts)
        )
    )
    bins = next_power_of_2(experts + 1)
    width = max(32, min(256, next_power_of_2(block_m)))
    if pairs <= ONE_LAUNCH_PAIRS_MAX:
        span = max(32, min(1024, next_power_of_2(pairs)))
        _by_expert[(experts,)](
            ids,
            *found,
            pairs,
            experts,
            blocks,
            BLOCK_M=block_m,
            BINS=bins,
            SPAN=span,
            WIDTH=width,
            **dependent_launch.options(),
        )
        return found
    chunks = cdiv(pairs, CHUNK_PAIRS)
    counts = torch.empty(bins, chunks, dtype=torch.int32, device=device)
    totals = torch.empty(bins, dtype=torch.int32, device=device)
    _count[(chunks,)](
        ids,
        counts,
        pairs,
        experts,
        chunks,
        BINS=bins,
        SPAN=CHUNK_PAIRS,
        **dependent_launch.options(),
    )
    _scan[(bins,)](counts, totals, chunks, SPAN=1024, **dependent_launch.options())
    _place[(chunks + experts,)](
        ids,
        counts,
        totals,
        *found,
        pairs,
        experts,
        chunks,
        blocks,
        BLOCK_M=block_m,
        BINS=bins,
        SPAN=CHUNK_PAIRS,
        WIDTH=width,
        **dependent_launch.options(),
    )
    return found
