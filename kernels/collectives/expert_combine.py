"""Return of experts' results to the ranks of their tokens, through peers' buffers.

See ``kernels.collectives.expert_dispatch``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.all_reduce import ALL_STAGES
from glowplug.kernels.collectives.expert_dispatch import PROGRAMS_MAX, held_index, warps_for
from glowplug.kernels.collectives.push import (
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    next_turn,
    received,
    slot_of,
)
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2


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
    BLOCK_PITCH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Send every rank this rank's results for that rank's rows.

    Then sum the results that arrive for this rank's own rows.
    """
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    pitch = tl.arange(0, BLOCK_PITCH)
    chosen = choice < TOPK
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, y)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for row in range(first, rows, tl.num_programs(0)):
            turn = tl.load(turns + row)
            for distance in tl.static_range(1, RANKS):
                source = (RANK + distance) % RANKS
                there = source * rows + row
                held = tl.load(local + there * TOPK + choice, mask=chosen, other=-1)
                inside = column < tl.where(tl.max(held) >= 0, hidden, 0)
                bits = bits_of(tl.load(y + there * hidden + column, mask=inside, other=0.0))
                place = slot_of(turn, RANK, source, capacity, RANKS) + row * PITCH
                tl.store(buffers_of(peers, source, y) + place + column, bits, mask=inside)
    if STAGES & 2:
        for row in range(first, rows, tl.num_programs(0)):
            turn = tl.load(turns + row)
            clear(row * PITCH + pitch, pitch < PITCH, own, turn, capacity, RANKS)
            size = tl.where(row < tokens, hidden, 0)  # rows after the tokens are empty
            topk = tl.where(row < tokens, TOPK, 0)
            experts = tl.load(ids + row * ids_stride + choice, mask=choice < topk, other=-1)
            total = tl.zeros((BLOCK,), tl.float32)
            for rank in tl.static_range(RANKS):
                used = tl.max(held_index(experts.to(tl.int32), rank // WITHIN, HELD)) >= 0
                inside = column < tl.where(used, hidden, 0)
                if rank == RANK:
                    there = RANK * rows + row
                    mine = tl.load(y + there * hidden + column, mask=inside, other=0.0)
                    total += mine.to(tl.float32)
                else:
                    at = own + slot_of(turn, rank, RANK, capacity, RANKS) + row * PITCH
                    bits = received(at + column, inside, fault, rank, LIMIT)
                    total += bits.to(y.dtype.element_ty, bitcast=True).to(tl.float32)
            if BESIDE:
                there = beside + row * beside_stride + column
                total += tl.load(there, mask=column < size, other=0.0).to(tl.float32)
            value = total.to(out.dtype.element_ty)
            tl.store(out + row * hidden + column, value, mask=column < hidden)
            next_turn(turns, row, turn)


def combine(
    y: Tensor,
    local: Tensor,
    ids: Tensor,
    held: int,
    buffers: PeerBuffers,
    *,
    within: int = 1,
    beside: Tensor | None = None,
    dtype: torch.dtype | None = None,
    stages: int = ALL_STAGES,
) -> Tensor:
    """Return the sums of the results of this rank's tokens, [S, hidden]; other rows are zeros.

    Args:
        y: results of this rank's experts, [ranks * S, hidden]; rows without an expert on this rank
            may hold anything.
        local: ``Dispatched.ids``.
        ids: experts of this rank's tokens, int [T, K], as in ``dispatch``.
        held: number of experts of a share.
        buffers: the group's buffers, others than those of ``dispatch``, with a tile for each row.
        within: number of neighbouring ranks that hold parts of the same share.
        beside: [T, hidden], to be added in float32.
        dtype: dtype of the sums; None: y's.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
    """
    tokens, topk = ids.shape
    hidden = y.shape[1]
    rows = len(y) // buffers.ranks
    out = y.new_empty(rows, hidden, dtype=dtype)
    capacity, pitch = buffers.words(y)
    assert hidden <= pitch and rows * pitch <= capacity, "each row needs a tile"
    if rows:
        _combine[(min(rows, PROGRAMS_MAX),)](
            y,
            local,
            ids,
            beside,
            out,
            *buffers.tensors,
            ids.stride(0),
            0 if beside is None else beside.stride(0),
            tokens,
            rows,
            hidden,
            capacity,
            TOPK=topk,
            HELD=held,
            WITHIN=within,
            BESIDE=beside is not None,
            BLOCK=next_power_of_2(hidden),
            BLOCK_K=next_power_of_2(topk),
            PITCH=pitch,
            BLOCK_PITCH=next_power_of_2(pitch),
            num_warps=warps_for(hidden),
            **buffers.constants(stages),
        )
    return out
