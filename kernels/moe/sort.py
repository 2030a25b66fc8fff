"""Activations in the order of their experts and back: for grouped products that want an expert's
rows side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.moe.align import Alignment

#: places whose scales a program brings in order; alignments of so many rows a block, or a multiple
ROWS = 16
WIDTH = 8192  #: numbers of a token that a program writes to all its places


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
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
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
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + token * x_stride + column, mask=column < depth, other=0.0)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        here = column < tl.where(tl.load(ids + pair) >= 0, depth, 0)
        row = tl.load(place + pair).to(tl.int64)  # anything where the expert is not here
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
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(WIDTH):
        pair = token * WIDTH + slot
        here = column < tl.where(tl.load(ids + pair) >= 0, size, 0)
        row = tl.load(place + pair).to(tl.int64)  # anything where the expert is not here
        part = tl.load(y + row * size + column, mask=here, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def gather_rows(
    x: Tensor, x_scales: Tensor, order: Alignment, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x E4M3 [T, N] and its scales in the order of ``order.sorted_pairs`` [R], and where each pair
    of ids [T, K] went.

    Returns values [R, N], scales [R, ceil(N / 128)] with rows side by side, place int32 [T * K].
    Rows of padding are not written. R is a multiple of 16.
    """
    rows = order.sorted_pairs.shape[0]
    (tokens, depth) = x.shape
    groups = x_scales.shape[1]
    values = torch.empty(rows, depth, dtype=x.dtype, device=x.device)
    scales = torch.empty(groups, rows, device=x.device)
    place = torch.empty(ids.numel(), dtype=torch.int32, device=x.device)
    options = {"PER_TOKEN": ids.shape[1], "num_warps": 4, **dependent.options()}
    _place[(cdiv(rows, ROWS),)](
        x_scales,
        order.sorted_pairs,
        order.num_padded,
        scales,
        place,
        ids.numel(),
        groups,
        x_scales.stride(1),
        rows,
        ROWS=ROWS,
        GROUPS=next_power_of_2(groups),
        **options,
    )
    width = min(WIDTH, next_power_of_2(depth))
    _spread[(tokens, cdiv(depth, width))](
        x, ids, place, values, depth, x.stride(0), WIDTH=width, **options
    )
    return values, scales.t(), place


def sum_placed(y: Tensor, place: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """y [R, H], place int32 [T * K], ids and weights float32 [T, K] -> [T, H]: the weighted sum of
    a token's rows.

    Float32, in the order of K; rows of experts held elsewhere (-1) are not read.
    """
    (tokens, width) = ids.shape
    size = y.shape[1]
    out = torch.empty(tokens, size, dtype=y.dtype, device=y.device)
    block = min(1024, next_power_of_2(size))
    _sum[(tokens, cdiv(size, block))](
        y, place, ids, weights, out, size, WIDTH=width, BLOCK=block, **dependent.options()
    )
    return out
