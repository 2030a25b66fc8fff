"""Exchange of tokens with the ranks of their experts, through peers' buffers.

Dispatch sends a token's experts and weights to every rank, and the token itself only to ranks that
hold one of its experts. Combine sends the results back from these ranks only and sums them in order
of rank. Both have fixed shapes and can be captured. A token has a row of its own in the buffers.

A step's calls alternate: every combine follows a dispatch of as many rows. Dispatch exchanges data
among all ranks, so no rank is more than one combine ahead of another, although a combine does not
exchange data between all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.all_reduce import ALL_STAGES
from glowplug.kernels.collectives.buffer_sizes import token_words
from glowplug.kernels.collectives.push import (
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    next_turn,
    received,
    slot_of,
)
from glowplug.kernels.formats.fp8_triton import empty_quantized
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.launch.rows import rows_of

#: Most programs. They wait for programs of other ranks, so all must run at the same time: one on
#: each multiprocessor of an H200, since 16 warps take up to 127 registers a thread.
PROGRAMS_MAX = 132


class Dispatched(NamedTuple):
    """The tokens of all ranks, S rows a rank.

    Attributes:
        x: [ranks * S, hidden]; rows without an expert on this rank hold anything.
        ids: experts on this rank, int32 [ranks * S, K]; -1 for experts of other ranks.
        weights: float32 [ranks * S, K].
        scales: float32 scales of an E4M3 x, [ranks * S, G], in the layout of ``empty_quantized``;
            None for other dtypes.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None = None


def as_words(x: Tensor) -> Tensor:
    """Return x as the kernels move it: E4M3 numbers as pairs, int16 [T, hidden / 2]."""
    return x.view(torch.int16) if x.element_size() == 1 else x


def row_words(x: Tensor, topk: int, groups: int = 0) -> int:
    """Return the number of 16-bit words that a token of x needs in the buffers of ``dispatch``."""
    return token_words(x.shape[1] * x.element_size(), topk, groups)


@triton.jit
def held_index(ids, share, HELD: tl.constexpr):
    """Return the index of each expert of ``ids`` within share number ``share``; -1: not in it.

    Every share has HELD experts.
    """
    local = ids - share * HELD
    return tl.where((local >= 0) & (local < HELD), local, -1)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _dispatch(
    x,
    scales,
    ids,
    weights,
    out,
    out_scales,
    out_ids,
    out_weights,
    peers,
    turns,
    fault,
    x_stride,
    scale_stride,
    group_stride,
    out_scale_stride,
    out_group_stride,
    ids_stride,
    weights_stride,
    tokens,
    rows,
    size,
    capacity,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    HELD: tl.constexpr,
    WITHIN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_PITCH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Send rows of this rank, and receive the same rows of all ranks.

    A row in the buffers: ``size`` words of the token, then 32-bit words: ids, weights and scales.
    ``GROUPS``: number of a token's scales. ``WITHIN``: number of neighbouring ranks that hold parts
    of the same HELD experts.
    """
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    chosen = choice < TOPK
    group = tl.arange(0, BLOCK_G)
    pitch = tl.arange(0, BLOCK_PITCH)
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, x)
    dependent_launch.wait(DEPENDENT)
    if STAGES & 1:
        for row in range(first, rows, tl.num_programs(0)):
            turn = tl.load(turns + row)
            present = row < tokens  # rows after the tokens are empty
            topk = tl.where(present, TOPK, 0)
            words = tl.where(present, size, 0)
            groups = tl.where(present, GROUPS, 0)
            bits = bits_of(tl.load(x + row * x_stride + column, mask=column < words, other=0))
            experts = tl.load(ids + row * ids_stride + choice, mask=choice < topk, other=-1)
            experts = experts.to(tl.int32)
            factors = tl.load(
                weights + row * weights_stride + choice, mask=choice < topk, other=0.0
            )
            for distance in tl.static_range(1, RANKS):
                peer = (RANK + distance) % RANKS
                place = slot_of(turn, RANK, peer, capacity, RANKS) + row * PITCH
                target = buffers_of(peers, peer, x) + place
                behind = (target + size).to(tl.pointer_type(tl.int32))
                tl.store(behind + choice, experts, mask=chosen)
                tl.store(behind + TOPK + choice, bits_of(factors), mask=chosen)
                wanted = tl.max(held_index(experts, peer // WITHIN, HELD)) >= 0
                tl.store(target + column, bits, mask=column < tl.where(wanted, size, 0))
                if GROUPS > 0:
                    there = scales + row * scale_stride + group * group_stride
                    scale = tl.load(there, mask=group < groups, other=0.0)
                    sent = group < tl.where(wanted, GROUPS, 0)
                    tl.store(behind + 2 * TOPK + group, bits_of(scale), mask=sent)
    if STAGES & 2:
        for row in range(first, rows, tl.num_programs(0)):
            turn = tl.load(turns + row)
            clear(row * PITCH + pitch, pitch < PITCH, own, turn, capacity, RANKS)
            for source in tl.static_range(RANKS):
                there = source * rows + row
                if source == RANK:
                    present = row < tokens
                    topk = tl.where(present, TOPK, 0)
                    given = tl.load(ids + row * ids_stride + choice, mask=choice < topk, other=-1)
                    local = held_index(given.to(tl.int32), RANK // WITHIN, HELD)
                    factors = tl.load(
                        weights + row * weights_stride + choice, mask=choice < topk, other=0.0
                    )
                    inside = column < tl.where(present, size, 0)
                    value = tl.load(x + row * x_stride + column, mask=inside)
                    if GROUPS > 0:
                        scaled = group < tl.where(present, GROUPS, 0)
                        at = scales + row * scale_stride + group * group_stride
                        scale = tl.load(at, mask=scaled)
                else:
                    at = own + slot_of(turn, source, RANK, capacity, RANKS) + row * PITCH
                    behind = (at + size).to(tl.pointer_type(tl.int32))
                    given = received(behind + choice, chosen, fault, source, LIMIT)
                    local = held_index(tl.where(chosen, given, -1), RANK // WITHIN, HELD)
                    bits = received(behind + TOPK + choice, chosen, fault, source, LIMIT)
                    factors = bits.to(tl.float32, bitcast=True)
                    present = tl.max(local) >= 0
                    inside = column < tl.where(present, size, 0)
                    value = received(at + column, inside, fault, source, LIMIT)
                    value = value.to(out.dtype.element_ty, bitcast=True)
                    if GROUPS > 0:
                        scaled = group < tl.where(present, GROUPS, 0)
                        bits = received(behind + 2 * TOPK + group, scaled, fault, source, LIMIT)
                        scale = bits.to(tl.float32, bitcast=True)
                tl.store(out + there * size + column, value, mask=inside)
                tl.store(out_weights + there * TOPK + choice, factors, mask=chosen)
                tl.store(out_ids + there * TOPK + choice, local, mask=chosen)
                if GROUPS > 0:
                    at = out_scales + there * out_scale_stride + group * out_group_stride
                    tl.store(at, scale, mask=scaled)
            next_turn(turns, row, turn)


def dispatch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    rows: int,
    held: int,
    buffers: PeerBuffers,
    *,
    scales: Tensor | None = None,
    within: int = 1,
    stages: int = ALL_STAGES,
    out: Dispatched | None = None,
) -> Dispatched:
    """Send this rank's tokens to the ranks of their experts.

    Args:
        x: [T, hidden], a multiple of four bytes a row, in a dtype of ``SENT_DTYPES`` or E4M3.
        ids: chosen experts, int [T, K].
        weights: float32 [T, K].
        rows: number S of rows of every rank, at least T; rows after the tokens are empty.
        held: number of experts of a share; ranks hold the shares in order of rank.
        buffers: the group's buffers, with a tile of at least ``row_words`` for each of S rows.
        scales: float32 scales of an E4M3 x, [T, G]; may be strided.
        within: number of neighbouring ranks that hold parts of the same share.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.
        out: the result's tensors, for tests that run the stages one by one.
    """
    x = rows_of(x)
    topk = ids.shape[1]
    groups = 0 if scales is None else scales.shape[1]
    out = out or _empty(buffers.ranks * rows, topk, x, groups)
    if rows:
        _check_fit(x, topk, groups, rows, buffers)
        own = Dispatched(as_words(x), ids, weights, scales)
        _launch(own, out._replace(x=as_words(out.x)), rows, held, within, buffers, stages)
    return out


def _launch(
    own: Dispatched,
    out: Dispatched,
    rows: int,
    held: int,
    within: int,
    buffers: PeerBuffers,
    stages: int,
) -> None:
    """Launch the kernel for this rank's tokens ``own``; other arguments as for ``dispatch``."""
    tokens, size = own.x.shape
    topk = own.ids.shape[1]
    groups = 0 if own.scales is None else own.scales.shape[1]
    capacity, pitch = buffers.words(own.x)
    _dispatch[(min(rows, PROGRAMS_MAX),)](
        own.x,
        own.scales,
        own.ids,
        own.weights,
        out.x,
        out.scales,
        out.ids,
        out.weights,
        *buffers.tensors,
        own.x.stride(0),
        *_strides(own.scales),
        *_strides(out.scales),
        own.ids.stride(0),
        own.weights.stride(0),
        tokens,
        rows,
        size,
        capacity,
        TOPK=topk,
        GROUPS=groups,
        HELD=held,
        WITHIN=within,
        BLOCK=next_power_of_2(size),
        BLOCK_K=next_power_of_2(topk),
        BLOCK_G=next_power_of_2(max(1, groups)),
        PITCH=pitch,
        BLOCK_PITCH=next_power_of_2(pitch),
        num_warps=warps_for(size),
        **buffers.constants(stages),
    )


def _empty(rows: int, topk: int, like: Tensor, groups: int) -> Dispatched:
    """Allocate ``rows`` dispatched tokens in the dtype and on the device of ``like``."""
    ids = torch.empty(rows, topk, dtype=torch.int32, device=like.device)
    weights = torch.empty(rows, topk, dtype=torch.float32, device=like.device)
    if not groups:
        return Dispatched(like.new_empty(rows, like.shape[1]), ids, weights)
    values, scales = empty_quantized(rows, like.shape[1], like.device)
    return Dispatched(values, ids, weights, scales)


def _check_fit(x: Tensor, topk: int, groups: int, rows: int, buffers: PeerBuffers) -> None:
    """Check that ``rows`` tokens like those of x fit into the buffers."""
    assert x.shape[1] * x.element_size() % 4 == 0, "ids begin at an address of 32-bit words"
    fits = row_words(x, topk, groups) <= buffers.tile and rows * buffers.tile <= buffers.capacity
    assert fits, "each row needs a tile"


def _strides(scales: Tensor | None) -> tuple[int, int]:
    """Return the strides of scales [T, G]; zeros for None."""
    return (0, 0) if scales is None else (scales.stride(0), scales.stride(1))


def warps_for(words: int) -> int:
    """Return the number of warps of a program that moves a token of ``words`` words."""
    return 4 if words <= 2048 else 8 if words <= 4096 else 16
