"""Split-K first GEMM of the experts of one or two tokens in block FP8.

Without splits, few pairs give about as many programs as there are multiprocessors. Some
multiprocessors then read twice the bytes of the others, and the step waits for them. Depth splits
are small enough for an even distribution. The last program of a column block sums the splits, in
order, and computes silu(gate) * up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm.fp8 import add_scaled, load_tile, load_weight
from glowplug.kernels.launch import dependent_launch

#: copies of the token that fill the token side of an MMA to its smallest size
TOKEN_COPIES = 16
TICKETS_MAX = 8192  #: most pairs times column blocks


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
    """Multiply 128 gates and 128 ups of an expert, rows ``first`` on, by x.

    ``x_at`` [BLOCK_M, 128] points to the rows of x. ``xs_at`` points to the scales of x and
    ``gs_at`` to those of the gates; those of the ups are inter // 128 rows further on.
    ``weight`` is ``stored`` [E, 2 * inter, depth] or its TMA descriptor. The sums
    are over depth groups ``start`` to ``end``.

    Returns:
        Gates and ups, with ``SWAP`` [128, BLOCK_M] each, otherwise [BLOCK_M, 128].
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
    partial,
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
    """Compute 128 gates and ups of one (token, expert) pair over one depth split.

    The programs of a column block are consecutive.
    """
    dependent_launch.wait(DEPENDENT)
    dependent_launch.begin(DEPENDENT)  # after the wait, so that the next kernel may read the ids
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    blocks = inter // 128
    pair, block = place // blocks, place % blocks
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    n, same = tl.arange(0, 128), tl.zeros((TOKENS,), tl.int32)  # the row of x, TOKENS times
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
    target = partial + (place.to(tl.int64) * SPLITS + split) * 256 + n[:, None] + same[None, :]
    one = (n[:, None] >= 0) & (tl.arange(0, TOKENS) == 0)[None, :]
    tl.store(target, gate, mask=one)
    tl.store(target + 128, up, mask=one)
    tl.debug_barrier()
    if tl.atomic_add(tickets + place, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(tickets + place, 0)
        _activate(
            partial + place.to(tl.int64) * (SPLITS * 256),
            values + pair.to(tl.int64) * inter + block * 128,
            scales + block * scale_stride + pair,
            SPLITS,
        )


@triton.jit
def _activate(partial, values, scale_at, SPLITS: tl.constexpr):
    """Sum ``SPLITS`` splits of 128 gates and ups; store the quantised silu(gate) * up."""
    n = tl.arange(0, 128)
    gate = tl.zeros((128,), tl.float32)
    up = tl.zeros((128,), tl.float32)
    for split in tl.static_range(SPLITS):
        gate += tl.load(partial + split * 256 + n, cache_modifier=".cg")
        up += tl.load(partial + split * 256 + 128 + n, cache_modifier=".cg")
    stored, scale = fp8_triton.quantize_rows((gate / (1.0 + tl.exp(-gate)) * up)[None, :])
    tl.store(values + n[None, :], stored)
    tl.store(scale_at + tl.arange(0, 1), scale)


@cache
def _tickets(device: torch.device) -> Tensor:
    """Return a device's counters of finished splits, one per column block of a pair.

    NOTE: all streams share the counters, so two such GEMMs must not run at once on a device. The
    counters must be allocated before any graph capture.
    """
    return torch.zeros(TICKETS_MAX, dtype=torch.int32, device=device)


def tickets_suffice(pairs: int, inter: int) -> bool:
    """Return whether the counters of :func:`_tickets` suffice for all column blocks of the pairs.

    Args:
        pairs: number of (token, expert) pairs
        inter: channels between the GEMMs
    """
    return inter % FP8_BLOCK == 0 and pairs * (inter // FP8_BLOCK) <= TICKETS_MAX


def gated_by_splits(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor | TensorDescriptor,
    w13: Tensor,
    scales13: Tensor,
    ids: Tensor,
    per_token: int,
    splits: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute the quantised silu(gate) * up of every (token, expert) pair.

    Args:
        x: E4M3 [T, H].
        x_scales: float32 [T, ceil(H / 128)], column-major.
        weight: ``w13`` or its TMA descriptor.
        w13: E4M3 [E, 2I, H].
        scales13: float32, one per 128x128 block.
        ids: [T * K]; pairs with -1 are skipped.
        per_token: K.
        splits: Splits of the depth.
        options: TMA, EVEN, num_warps, num_stages and the launch options of ``dependent_launch``.

    Returns:
        values E4M3 [T * K, I] and scales float32 [T * K, I / 128], column-major.
    """
    inter = w13.shape[1] // 2
    depth = w13.shape[2]
    pairs = ids.numel()
    assert tickets_suffice(pairs, inter), "more column blocks than tickets"
    values, scales = fp8_triton.empty_quantized(pairs, inter, x.device)
    places = pairs * (inter // FP8_BLOCK)
    partial = torch.empty(places, splits, 2, FP8_BLOCK, dtype=torch.float32, device=x.device)
    _gated_parts[(places * splits,)](
        x,
        x_scales,
        weight,
        w13,
        scales13,
        values,
        scales,
        ids,
        partial,
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
        TOKENS=TOKEN_COPIES,
        **options,
    )
    return values, scales
