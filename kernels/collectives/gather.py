"""All-gather and reduce-scatter over peers' buffers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.all_reduce import ALL_STAGES, PROGRAMS_MAX, warps_for
from glowplug.kernels.collectives.push import (
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    next_turn,
    push,
    received,
    sum_of_ranks,
)
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv


@triton.jit
def _all_gather(
    x,
    out,
    peers,
    turns,
    fault,
    count,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Copy x [count] of every rank to ``out`` [RANKS, count]."""
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, x)
    first = tl.program_id(0)
    tiles = tl.cdiv(count, TILE)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for tile in range(first, tiles, tl.num_programs(0)):
            at = tile * TILE + tl.arange(0, TILE)
            mine = tl.load(x + at, mask=at < count)
            push(
                bits_of(mine),
                at,
                at < count,
                peers,
                tl.load(turns + tile),
                capacity,
                x,
                RANK,
                RANKS,
            )
            tl.store(out + RANK * count + at, mine, mask=at < count)
    if STAGES & 2:
        for tile in range(first, tiles, tl.num_programs(0)):
            turn = tl.load(turns + tile)
            at = tile * TILE + tl.arange(0, TILE)
            for distance in tl.static_range(1, RANKS):
                place = (turn * (RANKS - 1) + distance - 1) * capacity + at
                source = (RANK + distance) % RANKS
                bits = received(own + place, at < count, fault, source, LIMIT)
                there = out + source * count + at
                tl.store(there, bits.to(out.dtype.element_ty, bitcast=True), mask=at < count)
            clear(at, None, own, turn, capacity, RANKS)
            next_turn(turns, tile, turn)


@triton.jit
def _reduce_scatter(
    x,
    out,
    peers,
    turns,
    fault,
    count,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum part RANK of x [RANKS, count] over the ranks to ``out`` [count]."""
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, x)
    first = tl.program_id(0)
    tiles = tl.cdiv(count, TILE)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for tile in range(first, tiles, tl.num_programs(0)):
            turn = tl.load(turns + tile)
            at = tile * TILE + tl.arange(0, TILE)
            for distance in tl.static_range(1, RANKS):
                receiver = (RANK + distance) % RANKS
                bits = bits_of(tl.load(x + receiver * count + at, mask=at < count))
                place = (turn * (RANKS - 1) + RANKS - 1 - distance) * capacity + at
                tl.store(buffers_of(peers, receiver, x) + place, bits, mask=at < count)
    if STAGES & 2:
        for tile in range(first, tiles, tl.num_programs(0)):
            turn = tl.load(turns + tile)
            at = tile * TILE + tl.arange(0, TILE)
            mine = tl.load(x + RANK * count + at, mask=at < count)
            total = sum_of_ranks(
                mine, at, at < count, own, turn, capacity, fault, RANK, RANKS, LIMIT
            )
            tl.store(out + at, total.to(mine.dtype), mask=at < count)
            clear(at, None, own, turn, capacity, RANKS)
            next_turn(turns, tile, turn)


def all_gather(
    x: Tensor, buffers: PeerBuffers, stages: int = ALL_STAGES, out: Tensor | None = None
) -> Tensor:
    """Return x of every rank, [ranks, ...].

    Args:
        x: contiguous; ``buffers.fits(x)``.
        buffers: the group's buffers.
        stages: stages to run; all but for tests.
        out: the result's tensor, for tests that run the stages one by one.
    """
    if out is None:
        out = x.new_empty(buffers.ranks, *x.shape)
    count = x.numel()
    capacity, tile = buffers.words(x)
    if count:
        _all_gather[(min(cdiv(count, tile), PROGRAMS_MAX),)](
            x,
            out,
            buffers.peers,
            buffers.turns,
            buffers.fault,
            count,
            capacity,
            RANK=buffers.rank,
            RANKS=buffers.ranks,
            TILE=tile,
            STAGES=stages,
            LIMIT=buffers.limit,
            num_warps=warps_for(tile),
            **dependent_launch.options(),
        )
    return out


def reduce_scatter(x: Tensor, buffers: PeerBuffers, stages: int = ALL_STAGES) -> Tensor:
    """Return this rank's part of the sum of x over the ranks.

    Args:
        x: [ranks * N, ...], contiguous; ``buffers.fits(x, ranks)``.
        buffers: the group's buffers.
        stages: stages to run; all but for tests.

    Returns:
        [N, ...] in x's dtype.
    """
    out = x.new_empty(len(x) // buffers.ranks, *x.shape[1:])
    count = out.numel()
    capacity, tile = buffers.words(x)
    if count:
        _reduce_scatter[(min(cdiv(count, tile), PROGRAMS_MAX),)](
            x,
            out,
            buffers.peers,
            buffers.turns,
            buffers.fault,
            count,
            capacity,
            RANK=buffers.rank,
            RANKS=buffers.ranks,
            TILE=tile,
            STAGES=stages,
            LIMIT=buffers.limit,
            num_warps=warps_for(tile),
            **dependent_launch.options(),
        )
    return out
