"""Rows of experts in buffers that no alignment fills up: so many rows for every expert, or one
expert's rows right behind another's. Nothing waits for the device, and only rows of pairs that are
here are touched.

Pair t * K + k is token t's k-th expert. Scales are float32 [G, R, ceil(N / 128)] of buffers with G
* R rows, strided as a product wants them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_triton import GROUP, quantize_rows
from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

GROUPS = 8  #: groups of a row that one program moves or activates


class Static(NamedTuple):
    """``rows`` rows for every expert: place int32 [T * K], expert * rows + rank; counts int32 [E],
    rows in use.
    """

    place: Tensor
    counts: Tensor


class Packed(NamedTuple):
    """Expert behind expert, as CUTLASS's grouped products are told of two products [., H] -> [.,
    2I], [., I] -> [., H].

    Attributes:
        place: int32 [T * K].
        starts: int32 [E]: each expert's first row.
        sizes: int32 [2, E, 3]: rows, columns and depth of each expert's problem, in both products.
        strides: int64 [3, E]: from row to row of what is H, 2I and I wide.
    """

    place: Tensor
    starts: Tensor
    sizes: Tensor
    strides: Tensor


@triton.jit(do_not_specialize=["pairs", "rows"])
def _find(
    ids,
    place,
    counts,
    sizes,
    strides,
    pairs,
    rows,
    hidden,
    inter,
    experts,
    PACKED: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program an expert, which looks through all ids; ``counts`` are starts where ``PACKED``."""
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    expert = tl.program_id(0)
    lane = tl.arange(0, SPAN)
    first = expert * rows
    if PACKED:
        before = tl.zeros([SPAN], tl.int32)
        for start in range(0, pairs, SPAN):
            chosen = tl.load(ids + start + lane, mask=start + lane < pairs, other=-1).to(tl.int32)
            before += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
        first = tl.sum(before)
    found = 0
    for start in range(0, pairs, SPAN):
        chosen = tl.load(ids + start + lane, mask=start + lane < pairs, other=-1).to(tl.int32)
        mine = chosen == expert
        rank = tl.minimum(found + tl.cumsum(mine.to(tl.int32), 0) - 1, rows - 1)
        tl.store(place + start + lane, first + rank, mask=mine)
        found += tl.sum(mine.to(tl.int32))
    if PACKED:
        tl.store(counts + expert, first)
        up, down = sizes + expert * 3, sizes + (experts + expert) * 3
        tl.store(up, found)
        tl.store(up + 1, 2 * inter)
        tl.store(up + 2, hidden)
        tl.store(down, found)
        tl.store(down + 1, hidden)
        tl.store(down + 2, inter)
        tl.store(strides + expert, hidden.to(tl.int64))
        tl.store(strides + experts + expert, 2 * inter.to(tl.int64))
        tl.store(strides + 2 * experts + expert, inter.to(tl.int64))
    else:
        tl.store(counts + expert, tl.minimum(found, rows))


@triton.jit
def _scale_at(scales, row, rows, by_expert, by_row):
    return scales + row // rows * by_expert + row % rows * by_row


@triton.jit(do_not_specialize=["xs_stride", "rows", "by_expert", "by_row", "by_group"])
def _spread(
    x,
    x_scales,
    ids,
    place,
    values,
    scales,
    depth,
    x_stride,
    xs_stride,
    rows,
    by_expert,
    by_row,
    by_group,
    PER_TOKEN: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(1) * GROUPS * 128 + tl.arange(0, GROUPS * 128)
    value = tl.load(x + token * x_stride + column, mask=column < depth, other=0.0)
    scale = tl.load(x_scales + group * xs_stride + token, mask=group * 128 < depth, other=0.0)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        end = tl.where(tl.load(ids + pair) >= 0, depth, 0)
        row = tl.load(place + pair).to(tl.int64)  # anything where the expert is not here
        tl.store(values + row * depth + column, value, mask=column < end)
        tl.store(
            _scale_at(scales, row, rows, by_expert, by_row) + group * by_group,
            scale,
            mask=group * 128 < end,
        )


@triton.jit(do_not_specialize=["rows", "by_expert", "by_row", "by_group"])
def _activate(
    x,
    ids,
    place,
    values,
    scales,
    size,
    rows,
    by_expert,
    by_row,
    by_group,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    pair = tl.program_id(0)
    if tl.load(ids + pair) < 0:
        return
    row = tl.load(place + pair).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < size
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    stored, scale = quantize_rows(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(values + row * size + column, stored, mask=inside)
    tl.store(
        _scale_at(scales, row, rows, by_expert, by_row) + group.to(tl.int64) * by_group,
        scale,
        mask=group * 128 < size,
    )


def static(ids: Tensor, experts: int, rows: int) -> Static:
    """ids int32 or int64 [T, K] below ``experts``, or negative; none names an expert more than
    ``rows`` times (rows behind that many lie in the last one)."""
    place, counts = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (ids.numel(), experts)
    )
    _launch(ids, place, counts, counts, counts, rows, 0, 0, experts, packed=False)
    return Static(place, counts)


def packed(ids: Tensor, experts: int, hidden: int, inter: int) -> Packed:
    """ids as for :func:`static`, each any number of times."""
    count = {"dtype": torch.int32, "device": ids.device}
    found = Packed(
        torch.empty(ids.numel(), **count),
        torch.empty(experts, **count),
        torch.empty(2, experts, 3, **count),
        torch.empty(3, experts, dtype=torch.int64, device=ids.device),
    )
    _launch(ids, *found, ids.numel(), hidden, inter, experts, packed=True)
    return found


def _launch(
    ids: Tensor,
    place: Tensor,
    counts: Tensor,
    sizes: Tensor,
    strides: Tensor,
    rows: int,
    hidden: int,
    inter: int,
    experts: int,
    packed: bool,
) -> None:
    span = max(32, min(1024, next_power_of_2(ids.numel())))
    _find[(experts,)](
        ids,
        place,
        counts,
        sizes,
        strides,
        ids.numel(),
        rows,
        hidden,
        inter,
        experts,
        PACKED=packed,
        SPAN=span,
        **dependent.options(),
    )


def spread(
    x: Tensor, x_scales: Tensor, ids: Tensor, place: Tensor, values: Tensor, scales: Tensor
) -> None:
    """x E4M3 [T, N] with scales as ``fp8_quant`` lays them out, to values [G * R, N] and scales [G,
    R, .]: each token to the places of its pairs. Other rows stay as they are."""
    tokens, depth = x.shape
    _spread[(tokens, cdiv(depth, GROUPS * GROUP))](
        x,
        x_scales,
        ids,
        place,
        values,
        scales,
        depth,
        x.stride(0),
        x_scales.stride(1),
        scales.shape[1],
        *scales.stride(),
        PER_TOKEN=ids.shape[1],
        GROUPS=GROUPS,
        num_warps=4,
        **dependent.options(),
    )


def activate(x: Tensor, ids: Tensor, place: Tensor, values: Tensor, scales: Tensor) -> None:
    """x [G * R, 2N], gate then up -> silu(gate) * up, quantised from float32, to values [G * R, N]
    and scales
    [G, R, .]: rows of pairs that are here. Other rows stay as they are."""
    size = x.shape[1] // 2
    _activate[(ids.numel(), cdiv(size, GROUPS * GROUP))](
        x,
        ids,
        place,
        values,
        scales,
        size,
        scales.shape[1],
        *scales.stride(),
        GROUPS=GROUPS,
        num_warps=4,
        **dependent.options(),
    )
