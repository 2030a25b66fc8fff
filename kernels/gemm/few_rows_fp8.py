"""A block-scaled FP8 product of one token, where fetching W is all the time it takes:
``skinny_gemm``'s way with ``fp8_gemm``'s operands.

A program holds its rows of W, all columns or a part of them, in registers, and asks for them before
it waits for the kernel that computes x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_triton import GROUP
from glowplug.kernels.gemm.split_k import sum_parts
from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

#: bytes of W that a thread may hold
FEWEST = 64
MOST = 512


@triton.jit
def _vector(
    x,
    x_scales,
    weight,
    w_scales,
    out,
    columns,
    depth,
    xs_stride,
    ws_stride,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program: ROWS columns of out, of a part of the depth, which is GROUPS groups at most."""
    dependent.begin(DEPENDENT)
    first, split, groups = tl.program_id(0) * ROWS, tl.program_id(1), tl.cdiv(depth, 128)
    start, end = groups * split // SPLITS, groups * (split + 1) // SPLITS
    last = tl.minimum(end * 128, depth)
    row, group, at = (
        first + tl.arange(0, ROWS),
        start + tl.arange(0, GROUPS),
        start * 128 + tl.arange(0, GROUPS * 128),
    )
    held = tl.load(
        weight + row.to(tl.int64)[:, None] * depth + at[None, :],
        mask=(row < columns)[:, None] & (at < last)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    w_scale = tl.load(w_scales + first // 128 * ws_stride + group, mask=group < end, other=0.0)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    dependent.wait(DEPENDENT)
    scale = tl.load(x_scales + group * xs_stride, mask=group < end, other=0.0) * w_scale
    value = tl.load(x + within, mask=within < last, other=0.0).to(tl.float32) * scale[:, None]
    total = tl.sum(held.to(tl.float32) * tl.reshape(value, (GROUPS * 128,))[None, :], 1)
    tl.store(out + split * columns + row, total.to(out.dtype.element_ty), mask=row < columns)


def groups_of(depth: int, splits: int) -> int:
    """Groups that a program makes room for."""
    return next_power_of_2(cdiv(cdiv(depth, GROUP), splits))


def fits(tokens: int, rows: int) -> bool:
    """Can programs of so many ``rows`` of W do it? Those lie in one block of scales."""
    return tokens == 1 and GROUP % rows == 0


def multiply(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype,
    rows: int,
    splits: int,
    warps: int,
) -> Tensor:
    """As ``fp8_gemm.gemm`` with one row of x and scales of whole blocks: ``rows`` of W a program
    (see ``fits``), the depth in ``splits`` parts."""
    depth = x.shape[1]
    columns = weight.shape[0]
    out = torch.empty(1, columns, dtype=dtype, device=x.device)
    into = (
        out
        if splits == 1
        else torch.empty(splits, 1, columns, dtype=torch.float32, device=x.device)
    )
    _vector[(cdiv(columns, rows), splits)](
        x,
        x_scales,
        weight,
        w_scales,
        into,
        columns,
        depth,
        x_scales.stride(1),
        w_scales.stride(0),
        ROWS=rows,
        GROUPS=groups_of(depth, splits),
        SPLITS=splits,
        num_warps=warps,
        **dependent.options(),
    )
    if splits > 1:
        sum_parts(into, out)
    return out
