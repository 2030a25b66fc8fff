"""Exchange of tokens with the ranks of their experts, through peers' buffers.

Dispatch sends a token's experts and weights to every rank, and the token itself only to ranks that
hold one of its experts. Combine sends the results back from these ranks only and sums them in order
of rank. Both have fixed shapes and can be captured. A token has a row of its own in the buffers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.all_reduce import ALL_STAGES
from glowplug.kernels.collectives.push import (
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    next_turn,
    received,
)
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.launch.rows import rows_of

ROW_ALIGNMENT = 64  #: 16-bit words


class Dispatched(NamedTuple):
    """The tokens of all ranks, S rows a rank.

    Attributes:
        x: [ranks * S, hidden]; rows without an expert on this rank hold anything.
        ids: experts on this rank, int32 [ranks * S, K]; -1 for experts of other ranks.
        weights: float32 [ranks * S, K].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor


def row_words(hidden: int, topk: int) -> int:
    """Return the number of 16-bit words of a token: the ``tile`` of both exchanges."""
    return -(-(hidden + 4 * topk) // ROW_ALIGNMENT) * ROW_ALIGNMENT


@triton.jit
def _held(ids, share, HELD: tl.constexpr):
    """Return the index of each expert of ``ids`` within share number ``share``; -1: not in it.

    Every share has HELD experts.
    """
    local = ids - share * HELD
    return tl.where((local >= 0) & (local < HELD), local, -1)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _dispatch(
    x,
    ids,
    weights,
    out,
    out_ids,
    out_weights,
    peers,
    turns,
    fault,
    x_stride,
    ids_stride,
    weights_stride,
    tokens,
    rows,
    hidden,
    capacity,
    TOPK: tl.constexpr,
    HELD: tl.constexpr,
    WITHIN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PITCH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Send row ``program_id(0)`` of this rank, and receive this row of all ranks.

    ``WITHIN``: number of neighbouring ranks that hold parts of the same HELD experts.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    chosen = choice < TOPK
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, x)
    dependent_launch.wait(DEPENDENT)
    turn = tl.load(turns + row)
    size = tl.where(row < tokens, hidden, 0)  # rows after the tokens are empty
    topk = tl.where(row < tokens, TOPK, 0)
    mine = tl.load(x + row * x_stride + column, mask=column < size, other=0.0)
    experts = tl.load(ids + row * ids_stride + choice, mask=choice < topk, other=-1).to(tl.int32)
    scales = tl.load(weights + row * weights_stride + choice, mask=choice < topk, other=0.0)
    if STAGES & 1:
        for distance in tl.static_range(1, RANKS):
            peer = (RANK + distance) % RANKS
            place = (turn * (RANKS - 1) + RANKS - 1 - distance) * capacity + row * PITCH
            target = buffers_of(peers, peer, x) + place
            behind = (target + hidden).to(tl.pointer_type(tl.int32))
            tl.store(behind + choice, experts, mask=chosen)
            tl.store(behind + TOPK + choice, bits_of(scales), mask=chosen)
            wanted = tl.max(_held(experts, peer // WITHIN, HELD)) >= 0
            tl.store(target + column, bits_of(mine), mask=column < tl.where(wanted, hidden, 0))
    if STAGES & 2:
        for source in tl.static_range(RANKS):
            there = source * rows + row
            if source == RANK:
                local = _held(experts, RANK // WITHIN, HELD)
                tl.store(out + there * hidden + column, mine, mask=column < hidden)
                tl.store(out_weights + there * TOPK + choice, scales, mask=chosen)
            else:
                index = (source - RANK - 1 + RANKS) % RANKS
                at = own + (turn * (RANKS - 1) + index) * capacity + row * PITCH
                behind = (at + hidden).to(tl.pointer_type(tl.int32))
                given = received(behind + choice, chosen, fault, source, LIMIT)
                local = _held(tl.where(chosen, given, -1), RANK // WITHIN, HELD)
                factors = received(behind + TOPK + choice, chosen, fault, source, LIMIT)
                inside = column < tl.where(tl.max(local) >= 0, hidden, 0)
                bits = received(at + column, inside, fault, source, LIMIT)
                value = bits.to(out.dtype.element_ty, bitcast=True)
                tl.store(out + there * hidden + column, value, mask=inside)
                factors = factors.to(tl.float32, bitcast=True)
                tl.store(out_weights + there * TOPK + choice, factors, mask=chosen)
            tl.store(out_ids + there * TOPK + choice, local, mask=chosen)
        words = tl.arange(0, 2 * BLOCK)
        clear(row * PITCH + words, words < PITCH, own, turn, capacity, RANKS)
        next_turn(turns, row, turn)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _combine(
    y,
    local,
    ids,
    beside,
    out,
    peers,
    turns,
    fault,
    ids_stride,
    beside_stride,
    tokens,
    rows,
    hidden,
    capacity,
    TOPK: tl.constexpr,
    HELD: tl.constexpr,
    WITHIN: tl.constexpr,
    BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PITCH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Send every rank this rank's results for that rank's row ``program_id(0)``.

    Then sum the results that arrive for this rank's own row.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    chosen = choice < TOPK
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, y)
    dependent_launch.wait(DEPENDENT)
    turn = tl.load(turns + row)
    if STAGES & 1:
        for distance in tl.static_range(1, RANKS):
            source = (RANK + distance) % RANKS
            there = source * rows + row
            used = tl.max(tl.load(local + there * TOPK + choice, mask=chosen, other=-1)) >= 0
            inside = column < tl.where(used, hidden, 0)
            bits = bits_of(tl.load(y + there * hidden + column, mask=inside, other=0.0))
            place = (turn * (RANKS - 1) + RANKS - 1 - distance) * capacity + row * PITCH
            tl.store(buffers_of(peers, source, y) + place + column, bits, mask=inside)
    if STAGES & 2:
        size = tl.where(row < tokens, hidden, 0)  # rows after the tokens are empty
        topk = tl.where(row < tokens, TOPK, 0)
        experts = tl.load(ids + row * ids_stride + choice, mask=choice < topk, other=-1)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            used = tl.max(_held(experts.to(tl.int32), rank // WITHIN, HELD)) >= 0
            inside = column < tl.where(used, hidden, 0)
            if rank == RANK:
                there = y + (RANK * rows + row) * hidden + column
                total += tl.load(there, mask=inside, other=0.0).to(tl.float32)
            else:
                index = (rank - RANK - 1 + RANKS) % RANKS
                at = own + (turn * (RANKS - 1) + index) * capacity + row * PITCH
                bits = received(at + column, inside, fault, rank, LIMIT)
                total += bits.to(y.dtype.element_ty, bitcast=True).to(tl.float32)
        if BESIDE:
            there = beside + row * beside_stride + column
            total += tl.load(there, mask=column < size, other=0.0).to(tl.float32)
        tl.store(
            out + row * hidden + column,
            total.to(out.dtype.element_ty),
            mask=column < size,
        )
        words = tl.arange(0, 2 * BLOCK)
        clear(row * PITCH + words, words < PITCH, own, turn, capacity, RANKS)
        next_turn(turns, row, turn)


def dispatch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    rows: int,
    held: int,
    buffers: PeerBuffers,
    *,
    within: int = 1,
    stages: int = ALL_STAGES,
    out: Dispatched | None = None,
) -> Dispatched:
    """Send this rank's tokens to the ranks of their experts.

    Args:
        x: [T, hidden], bfloat16 or float16, of an even size.
        ids: chosen experts, int [T, K].
        weights: float32 [T, K].
        rows: number S of rows of every rank, at least T; rows after the tokens are empty.
        held: number of experts of a share; ranks hold the shares in order of rank.
        buffers: the group's buffers, with a tile of ``row_words`` for each of S rows.
        within: number of neighbouring ranks that hold parts of the same share.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
        out: the result's tensors, for tests that run the stages one by one.
    """
    x = rows_of(x)
    tokens, hidden = x.shape
    topk = ids.shape[1]
    assert hidden % 2 == 0 and row_words(hidden, topk) <= buffers.tile, "a token needs a tile"
    out = out or _empty(buffers.ranks * rows, hidden, topk, x)
    if rows:
        _dispatch[(rows,)](
            x,
            ids,
            weights,
            *out,
            buffers.peers,
            buffers.turns,
            buffers.fault,
            x.stride(0),
            ids.stride(0),
            weights.stride(0),
            tokens,
            rows,
            hidden,
            buffers.capacity,
            TOPK=topk,
            HELD=held,
            WITHIN=within,
            BLOCK=next_power_of_2(hidden),
            BLOCK_K=next_power_of_2(topk),
            PITCH=buffers.tile,
            num_warps=warps_for(hidden),
            **buffers.constants(stages),
        )
    return out


def _empty(rows: int, hidden: int, topk: int, like: Tensor) -> Dispatched:
    """Allocate ``rows`` dispatched tokens in the dtype and on the device of ``like``."""
    return Dispatched(
        like.new_empty(rows, hidden),
        torch.empty(rows, topk, dtype=torch.int32, device=like.device),
        torch.empty(rows, topk, dtype=torch.float32, device=like.device),
    )


def combine(
    y: Tensor,
    local: Tensor,
    ids: Tensor,
    held: int,
    buffers: PeerBuffers,
    *,
    within: int = 1,
    beside: Tensor | None = None,
    stages: int = ALL_STAGES,
) -> Tensor:
    """Return the sums of the results of this rank's tokens, [T, hidden] in y's dtype.

    Args:
        y: results of this rank's experts, [ranks * S, hidden]; rows without an expert on this rank
            may hold anything.
        local: ``Dispatched.ids``.
        ids: experts of this rank's tokens, int [T, K], as in ``dispatch``.
        held: number of experts of a share.
        buffers: the group's buffers, others than those of ``dispatch``, with a tile for each row.
        within: number of neighbouring ranks that hold parts of the same share.
        beside: [T, hidden], to be added in float32.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
    """
    tokens, topk = ids.shape
    hidden = y.shape[1]
    rows = len(y) // buffers.ranks
    out = y.new_empty(tokens, hidden)
    if rows:
        _combine[(rows,)](
            y,
            local,
            ids,
            beside,
            out,
            buffers.peers,
            buffers.turns,
            buffers.fault,
            ids.stride(0),
            0 if beside is None else beside.stride(0),
            tokens,
            rows,
            hidden,
            buffers.capacity,
            TOPK=topk,
            HELD=held,
            WITHIN=within,
            BESIDE=beside is not None,
            BLOCK=next_power_of_2(hidden),
            BLOCK_K=next_power_of_2(topk),
            PITCH=buffers.tile,
            num_warps=warps_for(hidden),
            **buffers.constants(stages),
        )
    return out


def warps_for(hidden: int) -> int:
    """Return the number of warps of a program that moves a token."""
    return 4 if hidden <= 2048 else 8 if hidden <= 4096 else 16
