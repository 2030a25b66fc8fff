"""All-reduce over peers' buffers: one-shot, and two-shot for larger tensors of many ranks.

One-shot: every rank sends its numbers to all peers and sums what arrives. Two-shot: tile t belongs
to rank t mod ranks; every rank sends the tile to this owner, which sends the sum to all peers. It
sends 2 (ranks - 1) / ranks instead of ranks - 1 times the tensor, and waits twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.push import (
    TURNS,
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    clear_one,
    next_turn,
    push,
    received,
    slot_of,
    sum_of_ranks,
)
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv

#: most programs, so that the tiles of a large tensor overlap: 8 programs of 8 warps on each
#: multiprocessor of an H200 (2, 4 and 8 MB: 8.9, 14.9 and 27.9 us, with 4 of 16 warps 9.5, 16.8 and
#: 32.6)
PROGRAMS_MAX = 1056
SEND, SUM, RECEIVE = 1, 2, 4  #: stages of a kernel; tests on one device run them one by one
ALL_STAGES = SEND | SUM | RECEIVE


@triton.jit
def _one_shot(
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
    """Write the sum of x [count] over the ranks to ``out``, in one exchange with all peers."""
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, x)
    first = tl.program_id(0)
    tiles = tl.cdiv(count, TILE)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for tile in range(first, tiles, tl.num_programs(0)):
            at = tile * TILE + tl.arange(0, TILE)
            bits = bits_of(tl.load(x + at, mask=at < count))
            push(bits, at, at < count, peers, tl.load(turns + tile), capacity, x, RANK, RANKS)
    if STAGES & 2:
        for tile in range(first, tiles, tl.num_programs(0)):
            turn = tl.load(turns + tile)
            at = tile * TILE + tl.arange(0, TILE)
            mine = tl.load(x + at, mask=at < count)
            clear(at, None, own, turn, capacity, RANKS)
            total = sum_of_ranks(
                mine, at, at < count, own, turn, capacity, fault, RANK, RANKS, LIMIT
            )
            tl.store(out + at, total.to(mine.dtype), mask=at < count)
            next_turn(turns, tile, turn)


@triton.jit
def _two_shot(
    x,
    out,
    terms,
    sums,
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
    """Write the sum of x [count] over the ranks to ``out``; each tile is summed by its owner.

    ``terms`` and ``sums``: ``PeerBuffers.peers`` of the buffers for numbers to sum and for sums.
    """
    dependent_launch.begin(DEPENDENT)
    own_terms = buffers_of(terms, RANK, x)
    own_sums = buffers_of(sums, RANK, x)
    first = tl.program_id(0)
    tiles = tl.cdiv(count, TILE)
    column = tl.arange(0, TILE)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for tile in range(first, tiles, tl.num_programs(0)):
            owner = tile % RANKS
            at = tile * TILE + column
            if owner != RANK:
                bits = bits_of(tl.load(x + at, mask=at < count))
                place = slot_of(tl.load(turns + tile), RANK, owner, capacity, RANKS)
                target = buffers_of(terms, owner, x) + place + tile // RANKS * TILE + column
                tl.store(target, bits, mask=at < count)
    if STAGES & 2:
        for tile in range(first, tiles, tl.num_programs(0)):
            if tile % RANKS == RANK:
                turn = tl.load(turns + tile)
                at = tile * TILE + column
                within = tile // RANKS * TILE + column
                mine = tl.load(x + at, mask=at < count)
                clear(within, None, own_terms, turn, capacity, RANKS)
                total = sum_of_ranks(
                    mine, within, at < count, own_terms, turn, capacity, fault, RANK, RANKS, LIMIT
                ).to(mine.dtype)
                push(bits_of(total), within, at < count, sums, turn, capacity, x, RANK, RANKS)
                tl.store(out + at, total, mask=at < count)
    if STAGES & 4:
        for tile in range(first, tiles, tl.num_programs(0)):
            owner = tile % RANKS
            turn = tl.load(turns + tile)
            at = tile * TILE + column
            if owner != RANK:
                within = tile // RANKS * TILE + column
                former = slot_of((turn + TURNS - 1) % TURNS, owner, RANK, capacity, RANKS) + within
                clear_one(own_sums + former, None, own_sums)
                place = slot_of(turn, owner, RANK, capacity, RANKS) + within
                bits = received(own_sums + place, at < count, fault, owner, LIMIT)
                tl.store(out + at, bits.to(out.dtype.element_ty, bitcast=True), mask=at < count)
            next_turn(turns, tile, turn)


def one_shot(
    x: Tensor, buffers: PeerBuffers, stages: int = ALL_STAGES, out: Tensor | None = None
) -> Tensor:
    """Return the sum of x over the ranks, in x's dtype.

    Args:
        x: contiguous; ``buffers.fits(x)``.
        buffers: the group's buffers.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
        out: the result's tensor, contiguous; None: a new one.
    """
    if out is None:
        out = torch.empty_like(x)
    count = x.numel()
    capacity, tile = buffers.words(x)
    if count:
        _one_shot[(min(cdiv(count, tile), PROGRAMS_MAX),)](
            x,
            out,
            buffers.peers,
            buffers.turns,
            buffers.fault,
            count,
            capacity,
            TILE=tile,
            num_warps=warps_for(buffers.tile),
            **buffers.constants(stages),
        )
    return out


def two_shot(
    x: Tensor,
    terms: PeerBuffers,
    sums: PeerBuffers,
    stages: int = ALL_STAGES,
    out: Tensor | None = None,
) -> Tensor:
    """Return the sum of x over the ranks, in x's dtype.

    Args:
        x: contiguous; ``terms.fits(x, ranks)``.
        terms: buffers for the numbers that an owner sums; ``turns`` has an entry per tile of x.
        sums: buffers for the owners' sums, of the same capacity and tile.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
        out: the result's tensor, for tests that run the stages one by one.
    """
    if out is None:
        out = torch.empty_like(x)
    count = x.numel()
    capacity, tile = terms.words(x)
    if count:
        _two_shot[(min(cdiv(count, tile), PROGRAMS_MAX),)](
            x,
            out,
            terms.peers,
            sums.peers,
            terms.turns,
            terms.fault,
            count,
            capacity,
            TILE=tile,
            num_warps=warps_for(terms.tile),
            **terms.constants(stages),
        )
    return out


def warps_for(tile: int) -> int:
    """Return the number of warps of a program for ``tile`` 16-bit words, 16 bytes per thread."""
    return max(1, min(16, tile // (8 * 32)))
