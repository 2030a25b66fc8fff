"""First product of one or two tokens' experts in block FP8, an expert's columns shared out along
the depth as well.

Few pairs make about as many programs as there are multiprocessors, so that some get twice the bytes
of others and all wait for those. Cut along the depth, pieces are small enough to come out even; the
last program of a block of columns adds its parts up, in order, and activates.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.formats import fp8_triton as fp8_quant
from glowplug.kernels.gemm.fp8 import BLOCK, add_scaled, load_tile, load_weight
from glowplug.kernels.launch import dependent_launch as dependent

COLUMNS = 16  #: of x, all of them the one token, that a product takes at least
TICKETS = 8192  #: pairs times blocks of columns at most


@triton.jit
def gates_and_ups(
    x_at,
    xs_at,
    xs_stride,
    weight,
    stored,
    gs_at,
    ws_stride,
    expert,
    first,
    inter,
    depth,
    start,
    end,
    BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Rows ``first`` and following of an expert's gates and of its ups times the rows of x at
    ``x_at`` [BLOCK_M, 128],
    over groups ``start`` to ``end``: two of [128, BLOCK_M], or with the sides not swapped [BLOCK_M,
    128].

    Their scales lie at ``xs_at`` and ``gs_at``, those of the ups inter // 128 rows behind.
    ``weight``: ``stored`` [E, 2 * inter, depth] or its descriptor.
    """
    groups = tl.cdiv(depth, 128)
    gate_row = expert * 2 * inter + first
    up_row = gate_row + inter
    gate_at = stored + (gate_row + tl.arange(0, 128))[:, None] * depth + tl.arange(0, 128)[None, :]
    up_at = gate_at + inter.to(tl.int64) * depth
    us_at = gs_at + inter // 128 * ws_stride
    x_scale = tl.load(xs_at + start * xs_stride)
    gate_scale, up_scale = tl.load(gs_at + start), tl.load(us_at + start)
    if SWAP:
        gate = tl.zeros((128, BLOCK_M), tl.float32)
        up = tl.zeros((128, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, 128), tl.float32)
        up = tl.zeros((BLOCK_M, 128), tl.float32)
    for begin in range(start, end, ROUND):
        for step in tl.static_range(ROUND):
            group = begin + step
            ahead = tl.minimum(group + 1, groups - 1)
            next_x_scale = tl.load(xs_at + ahead * xs_stride)
            next_gate_scale, next_up_scale = tl.load(gs_at + ahead), tl.load(us_at + ahead)
            x_tile = load_tile(x_at, group, depth, EVEN)
            gate_tile = load_weight(weight, gate_row.to(tl.int32), gate_at, group, depth, TMA, EVEN)
            up_tile = load_weight(weight, up_row.to(tl.int32), up_at, group, depth, TMA, EVEN)
            gate = add_scaled(gate, x_tile, gate_tile, x_scale, gate_scale, False, SWAP)
            up = add_scaled(up, x_tile, up_tile, x_scale, up_scale, False, SWAP)
            x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
    return gate, up


@triton.jit(do_not_specialize=["xs_stride", "ws_stride", "ws_expert", "scale_stride"])
def _gated_parts(
    x,
    x_scales,
    weight,
    stored,
    w_scales,
    values,
    scales,
    ids,
    parts,
    tickets,
    inter,
    depth,
    x_stride,
    xs_stride,
    ws_expert,
    ws_stride,
    scale_stride,
    PER_TOKEN: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program: 128 gates and ups of one pair over a part of the depth. Those of a block lie side
    by side.
    """
    dependent.wait(DEPENDENT)
    dependent.begin(DEPENDENT)  # behind the wait: what begins now may read the ids
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    blocks = inter // 128
    pair, block = place // blocks, place % blocks
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    n, same = tl.arange(0, 128), tl.zeros((TOKENS,), tl.int32)  # the one row of x, TOKENS times
    row, groups = (pair // PER_TOKEN).to(tl.int64), tl.cdiv(depth, 128)
    gate, up = gates_and_ups(
        x + row * x_stride + same[:, None] + n[None, :],
        x_scales + row + same,
        xs_stride,
        weight,
        stored,
        w_scales + expert * ws_expert + block * ws_stride,
        ws_stride,
        expert,
        block * 128,
        inter,
        depth,
        groups * split // SPLITS,
        groups * (split + 1) // SPLITS,
        TOKENS,
        True,
        TMA,
        EVEN,
        1,
    )
    part = parts + (place.to(tl.int64) * SPLITS + split) * 256 + n[:, None] + same[None, :]
    one = (n[:, None] >= 0) & (tl.arange(0, TOKENS) == 0)[None, :]
    tl.store(part, gate, mask=one)
    tl.store(part + 128, up, mask=one)
    tl.debug_barrier()
    if tl.atomic_add(tickets + place, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(tickets + place, 0)
        _activate(
            parts + place.to(tl.int64) * (SPLITS * 256),
            values + pair.to(tl.int64) * inter + block * 128,
            scales + block * scale_stride + pair,
            SPLITS,
        )


@triton.jit
def _activate(parts, values, scale_at, SPLITS: tl.constexpr):
    """Quantised silu(gate) * up of 128 columns, of gates and ups in ``SPLITS`` parts."""
    n = tl.arange(0, 128)
    gate = tl.zeros((128,), tl.float32)
    up = tl.zeros((128,), tl.float32)
    for split in tl.static_range(SPLITS):
        gate += tl.load(parts + split * 256 + n, cache_modifier=".cg")
        up += tl.load(parts + split * 256 + 128 + n, cache_modifier=".cg")
    stored, scale = fp8_quant.quantize_rows((gate / (1.0 + tl.exp(-gate)) * up)[None, :])
    tl.store(values + n[None, :], stored)
    tl.store(scale_at + tl.arange(0, 1), scale)


@cache
def _tickets(device: torch.device) -> Tensor:
    """NOTE: one for all streams of a device, so two such products must not run at once on it; made
    before any capture.
    """
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def fits(pairs: int, inter: int) -> bool:
    """Are there tickets for all of the blocks?"""
    return inter % BLOCK == 0 and pairs * (inter // BLOCK) <= TICKETS


def gated(
    x: Tensor,
    x_scales: Tensor,
    held: Tensor | TensorDescriptor,
    w13: Tensor,
    scales13: Tensor,
    ids: Tensor,
    per_token: int,
    splits: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Quantised silu(gate) * up of every pair: x E4M3 [T, H] with scales, w13 E4M3 [E, 2I, H]
    (``held``: itself or its descriptor) with scales of blocks, ids [T * K], -1: left out -> E4M3 [T
    * K, I] and scales.

    ``options``: TMA, EVEN, num_warps, num_stages and those of ``dependent``.
    """
    inter = w13.shape[1] // 2
    depth = w13.shape[2]
    pairs = ids.numel()
    assert fits(pairs, inter), "more blocks of columns than there are tickets"
    values, scales = fp8_quant.empty_quantized(pairs, inter, x.device)
    places = pairs * (inter // BLOCK)
    parts = torch.empty(places, splits, 2, BLOCK, dtype=torch.float32, device=x.device)
    _gated_parts[(places * splits,)](
        x,
        x_scales,
        held,
        w13,
        scales13,
        values,
        scales,
        ids,
        parts,
        _tickets(x.device),
        inter,
        depth,
        x.stride(0),
        x_scales.stride(1),
        scales13.stride(0),
        scales13.stride(1),
        scales.stride(1),
        PER_TOKEN=per_token,
        SPLITS=splits,
        TOKENS=COLUMNS,
        **options,
    )
    return values, scales
