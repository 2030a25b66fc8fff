"""Row layouts of the libraries' grouped and masked FP8 GEMMs.

Rows of experts are stored without alignment padding: with a fixed capacity for every expert
(masked GEMM), or packed, one expert's rows directly after another's (CUTLASS's grouped GEMM).
The host never waits for the device. Only the rows of pairs whose expert is on this rank are read or
written.

Pair t * K + k is token t's k-th expert. Scales are float32 [G, R, ceil(N / 128)] for buffers with G
* R rows, with the strides that the GEMM requires.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.formats.fp8_triton import quantize_rows
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

GROUPS = 8  #: 128-channel groups of a row that one program copies or activates


class Static(NamedTuple):
    """A layout with a capacity of ``rows`` rows for every expert.

    Attributes:
        place: int32 [T * K]: each pair's row: expert * rows + its place among the expert's pairs.
        counts: int32 [E]: number of rows in use of each expert.
    """

    place: Tensor
    counts: Tensor


class PackedRows(NamedTuple):
    """A packed layout, and the problem sizes of CUTLASS's grouped GEMMs.

    The GEMMs are [., H] -> [., 2I] and [., I] -> [., H].

    Attributes:
        place: int32 [T * K]: each pair's row.
        starts: int32 [E]: each expert's first row.
        sizes: int32 [2, E, 3]: rows, columns and depth of each expert's problem, in both GEMMs.
        strides: int64 [3, E]: row strides of the operands with H, 2I and I columns.
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
    """Find the rows of one expert's (token, expert) pairs; each program reads all ids.

    With ``PACKED``, ``counts`` receives each expert's first row instead of its number of rows.
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
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
    """Return a pointer to the scale of the first group of 128 channels of ``row``."""
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
    """Copy ``GROUPS`` groups of a token, with their scales, to the rows of its pairs."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(1) * GROUPS * 128 + tl.arange(0, GROUPS * 128)
    value = tl.load(x + token * x_stride + column, mask=column < depth, other=0.0)
    scale = tl.load(x_scales + group * xs_stride + token, mask=group * 128 < depth, other=0.0)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        end = tl.where(tl.load(ids + pair) >= 0, depth, 0)
        row = tl.load(place + pair).to(tl.int64)  # undefined for an expert of another rank
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
    """Compute and quantise ``GROUPS`` groups of silu(gate) * up of a pair."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
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
    """Lay out (token, expert) pairs with a capacity of ``rows`` rows for every expert.

    Args:
        ids: int32 or int64 [T, K], below ``experts``; negative: an expert of another rank.
        experts: E.
        rows: Capacity. ``ids`` must not name an expert more often: the surplus pairs would share
            the expert's last row.
    """
    place, counts = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (ids.numel(), experts)
    )
    _launch(ids, place, counts, counts, counts, rows, 0, 0, experts, packed=False)
    return Static(place, counts)


def packed(ids: Tensor, experts: int, hidden: int, inter: int) -> PackedRows:
    """Lay out (token, expert) pairs by expert, without gaps.

    Args:
        ids: As for :func:`static`, with any number of pairs per expert.
        experts: E.
        hidden: H.
        inter: I.
    """
    device = ids.device
    found = PackedRows(
        torch.empty(ids.numel(), dtype=torch.int32, device=device),
        torch.empty(experts, dtype=torch.int32, device=device),
        torch.empty(2, experts, 3, dtype=torch.int32, device=device),
        torch.empty(3, experts, dtype=torch.int64, device=device),
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
    """Launch :func:`_find`, with one program per expert.

    It fills ``place`` and ``counts`` of :func:`static` or, if ``packed``, the fields of
    :func:`packed`'s result.
    """
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
        **dependent_launch.options(),
    )


def spread(
    x: Tensor, x_scales: Tensor, ids: Tensor, place: Tensor, values: Tensor, scales: Tensor
) -> None:
    """Copy tokens and their scales to the rows of their pairs. Other rows keep their content.

    Args:
        x: E4M3 [T, N].
        x_scales: float32 [T, ceil(N / 128)], in the layout of ``formats.fp8_triton``.
        ids: [T, K]; pairs with negative ids are skipped.
        place: int32 [T * K], the row of each pair.
        values: [G * R, N], written.
        scales: [G, R, ceil(N / 128)], written.
    """
    tokens, depth = x.shape
    _spread[(tokens, cdiv(depth, GROUPS * FP8_BLOCK))](
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
        **dependent_launch.options(),
    )


def activate(x: Tensor, ids: Tensor, place: Tensor, values: Tensor, scales: Tensor) -> None:
    """Compute and quantise silu(gate) * up of the pairs' rows. Other rows keep their content.

    Args:
        x: [G * R, 2N], gate then up; the activation is computed in float32.
        ids: [T, K]; pairs with negative ids are skipped.
        place: int32 [T * K], the row of each pair.
        values: E4M3 [G * R, N], written.
        scales: [G, R, ceil(N / 128)], written.
    """
    size = x.shape[1] // 2
    _activate[(ids.numel(), cdiv(size, GROUPS * FP8_BLOCK))](
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
        **dependent_launch.options(),
    )
