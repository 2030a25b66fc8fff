"""Copies of activations to rows sorted by expert, and back, for grouped GEMMs that need them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.moe.align import Alignment

#: positions whose scales a program moves; the alignment's block_m must be a multiple
SCALE_ROWS = 16
TOKEN_CHANNELS = 8192  #: channels of a token that a program copies to all of the token's positions


@triton.jit(do_not_specialize=["total_pairs", "scale_stride", "to_stride"])
def _place(
    x_scales,
    pairs,
    filled,
    scales,
    place,
    total_pairs,
    groups,
    scale_stride,
    to_stride,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Store the positions of ``ROWS`` sorted pairs, and copy their tokens' scales there."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    first = tl.program_id(0) * ROWS
    if first >= tl.load(filled):
        return
    row = first + tl.arange(0, ROWS)
    pair = tl.load(pairs + row)
    real = pair < total_pairs
    tl.store(place + pair, row, mask=real)
    token = tl.where(real, pair // PER_TOKEN, 0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = (group < groups)[:, None] & real[None, :]
    scale = tl.load(
        x_scales + group[:, None] * scale_stride + token[None, :], mask=inside, other=0.0
    )
    tl.store(scales + group.to(tl.int64)[:, None] * to_stride + row[None, :], scale, mask=inside)


@triton.jit
def _spread(
    x,
    ids,
    place,
    values,
    depth,
    x_stride,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Copy ``WIDTH`` channels of a token to the positions of its pairs."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + token * x_stride + column, mask=column < depth, other=0.0)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        here = column < tl.where(tl.load(ids + pair) >= 0, depth, 0)
        row = tl.load(place + pair).to(tl.int64)  # undefined for an expert of another rank
        tl.store(values + row * depth + column, value, mask=here)


@triton.jit
def _sum(
    y,
    place,
    ids,
    weights,
    out,
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum ``BLOCK`` channels of a token's weighted rows."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(WIDTH):
        pair = token * WIDTH + slot
        here = column < tl.where(tl.load(ids + pair) >= 0, size, 0)
        row = tl.load(place + pair).to(tl.int64)  # undefined for an expert of another rank
        part = tl.load(y + row * size + column, mask=here, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def gather_rows(
    x: Tensor, x_scales: Tensor, order: Alignment, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather tokens and their scales in the order of an alignment.

    Args:
        x: E4M3 [T, N].
        x_scales: float32 [T, ceil(N / 128)], column-major.
        order: The alignment of ``ids``, with R positions, a multiple of 16.
        ids: [T, K].

    Returns:
        Values [R, N], scales [R, ceil(N / 128)], column-major, and each pair's position, int32 [T *
        K]. Rows of padding are not written.
    """
    rows = order.sorted_pairs.shape[0]
    (tokens, depth) = x.shape
    groups = x_scales.shape[1]
    values = torch.empty(rows, depth, dtype=x.dtype, device=x.device)
    scales = torch.empty(groups, rows, device=x.device)
    place = torch.empty(ids.numel(), dtype=torch.int32, device=x.device)
    options = {"PER_TOKEN": ids.shape[1], "num_warps": 4, **dependent_launch.options()}
    _place[(cdiv(rows, SCALE_ROWS),)](
        x_scales,
        order.sorted_pairs,
        order.num_padded,
        scales,
        place,
        ids.numel(),
        groups,
        x_scales.stride(1),
        rows,
        ROWS=SCALE_ROWS,
        GROUPS=next_power_of_2(groups),
        **options,
    )
    width = min(TOKEN_CHANNELS, next_power_of_2(depth))
    _spread[(tokens, cdiv(depth, width))](
        x, ids, place, values, depth, x.stride(0), WIDTH=width, **options
    )
    return values, scales.t(), place


def sum_placed(y: Tensor, place: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted sum of each token's rows, in float32 in the order of K.

    Args:
        y: [R, H].
        place: int32 [T * K], the row of each pair.
        ids: [T, K]; rows of experts of other ranks (-1) are not read.
        weights: float32 [T, K].

    Returns:
        [T, H].
    """
    (tokens, width) = ids.shape
    size = y.shape[1]
    out = torch.empty(tokens, size, dtype=y.dtype, device=y.device)
    block = min(1024, next_power_of_2(size))
    _sum[(tokens, cdiv(size, block))](
        y, place, ids, weights, out, size, WIDTH=width, BLOCK=block, **dependent_launch.options()
    )
    return out
