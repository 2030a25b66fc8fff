"""All-gather and reduce-scatter over peers' buffers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.all_reduce import ALL_STAGES, PROGRAMS_MAX, warps_for
from glowplug.kernels.collectives.push import (
    SENT_DTYPES,
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    next_turn,
    push,
    received,
    slot_of,
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
    rows,
    columns,
    row_stride,
    rank_stride,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Copy x [rows, columns] of every rank to ``out``.

    ``row_stride`` and ``rank_stride``: strides of ``out`` between rows and between ranks.
    """
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, x)
    first = tl.program_id(0)
    tiles_a_row = tl.cdiv(columns, TILE)
    tiles = rows * tiles_a_row
    within = tl.arange(0, TILE)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for tile in range(first, tiles, tl.num_programs(0)):
            row = (tile // tiles_a_row).to(tl.int64)
            column = tile % tiles_a_row * TILE + within
            inside = column < columns
            mine = tl.load(x + row * columns + column, mask=inside)
            place = tile * TILE + within
            turn = tl.load(turns + tile)
            push(bits_of(mine), place, inside, peers, turn, capacity, x, RANK, RANKS)
            tl.store(out + row * row_stride + RANK * rank_stride + column, mine, mask=inside)
    if STAGES & 2:
        for tile in range(first, tiles, tl.num_programs(0)):
            turn = tl.load(turns + tile)
            row = (tile // tiles_a_row).to(tl.int64)
            column = tile % tiles_a_row * TILE + within
            inside = column < columns
            place = tile * TILE + within
            clear(place, None, own, turn, capacity, RANKS)
            for distance in tl.static_range(1, RANKS):
                source = (RANK + distance) % RANKS
                at = own + slot_of(turn, source, RANK, capacity, RANKS) + place
                bits = received(at, inside, fault, source, LIMIT)
                there = out + row * row_stride + source * rank_stride + column
                tl.store(there, bits.to(out.dtype.element_ty, bitcast=True), mask=inside)
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
    """Sum part RANK of x [RANKS, count] over the ranks into ``out`` [count]."""
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
                place = slot_of(turn, RANK, receiver, capacity, RANKS) + at
                tl.store(buffers_of(peers, receiver, x) + place, bits, mask=at < count)
    if STAGES & 2:
        for tile in range(first, tiles, tl.num_programs(0)):
            turn = tl.load(turns + tile)
            at = tile * TILE + tl.arange(0, TILE)
            mine = tl.load(x + RANK * count + at, mask=at < count)
            clear(at, None, own, turn, capacity, RANKS)
            total = sum_of_ranks(
                mine, at, at < count, own, turn, capacity, fault, RANK, RANKS, LIMIT
            )
            tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
            next_turn(turns, tile, turn)


def all_gather(
    x: Tensor,
    out: Tensor,
    buffers: PeerBuffers,
    stages: int = ALL_STAGES,
) -> None:
    """Copy x of every rank to ``out``.

    Args:
        x: [R, N], contiguous; ``rows_that_fit(x, buffers)`` is at least R.
        out: [R, ranks, N], written; its last dimension must be contiguous.
        buffers: the group's buffers.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
    """
    rows, columns = x.shape
    capacity, tile = buffers.words(x)
    if x.numel():
        _all_gather[(min(rows * cdiv(columns, tile), PROGRAMS_MAX),)](
            x,
            out,
            buffers.peers,
            buffers.turns,
            buffers.fault,
            rows,
            columns,
            out.stride(0),
            out.stride(1),
            capacity,
            TILE=tile,
            num_warps=warps_for(buffers.tile),
            **buffers.constants(stages),
        )


def rows_that_fit(x: Tensor, buffers: PeerBuffers) -> int:
    """Return the number of rows of x [R, N] that can be sent in one call."""
    if x.dtype not in SENT_DTYPES or not x.shape[1]:
        return 0
    capacity, tile = buffers.words(x)
    return capacity // (cdiv(x.shape[1], tile) * tile)


def reduce_scatter(
    x: Tensor,
    buffers: PeerBuffers,
    stages: int = ALL_STAGES,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of the sum of x over the ranks.

    Args:
        x: [ranks * N, ...], contiguous; ``buffers.fits(x, ranks)``.
        buffers: the group's buffers.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
        dtype: dtype of the sums; None: x's.
        out: the result's tensor, contiguous; None: a new one.

    Returns:
        [N, ...].
    """
    if out is None:
        out = x.new_empty(len(x) // buffers.ranks, *x.shape[1:], dtype=dtype)
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
            TILE=tile,
            num_warps=warps_for(buffers.tile),
            **buffers.constants(stages),
        )
    return out
