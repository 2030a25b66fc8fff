"""Block-scaled FP8 GEMV for one token, limited by reading W.

The method is that of ``gemm.few_rows``, the operands are those of ``gemm.fp8``. A program holds its
rows of W, all columns or one split of them, in registers. It loads them before it waits for the
kernel that computes x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm.split_k import sum_splits
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

THREAD_BYTES_MIN = 64  #: fewest bytes of W that a thread should hold
THREAD_BYTES_MAX = 512  #: most bytes of W that a thread may hold


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
    """Compute ``ROWS`` columns of ``out`` over one depth split of at most ``GROUPS`` groups."""
    dependent_launch.begin(DEPENDENT)
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
    dependent_launch.wait(DEPENDENT)
    scale = tl.load(x_scales + group * xs_stride, mask=group < end, other=0.0) * w_scale
    value = tl.load(x + within, mask=within < last, other=0.0).to(tl.float32) * scale[:, None]
    total = tl.sum(held.to(tl.float32) * tl.reshape(value, (GROUPS * 128,))[None, :], 1)
    tl.store(out + split * columns + row, total.to(out.dtype.element_ty), mask=row < columns)


def groups_of(depth: int, splits: int) -> int:
    """Return the number of 128-column groups that a program holds of a row of W.

    The ``depth`` columns of W are divided among ``splits`` programs. The number is rounded up to a
    power of two.
    """
    return next_power_of_2(cdiv(cdiv(depth, FP8_BLOCK), splits))


def held_rows_fit(tokens: int, rows: int) -> bool:
    """Return whether programs that hold ``rows`` rows of W can multiply ``tokens`` tokens.

    This is so if there is one token and the rows of a program are in one scale block.
    """
    return tokens == 1 and FP8_BLOCK % rows == 0


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
    """Compute ``gemm.fp8.gemm`` for one row of x and block scales.

    Args:
        x: E4M3 [1, K].
        x_scales: float32 [1, ceil(K / 128)].
        weight: E4M3 [N, K].
        w_scales: float32 [ceil(N / 128), ceil(K / 128)].
        dtype: Result's dtype.
        rows: Rows of W per program, see :func:`held_rows_fit`.
        splits: Splits of the depth.
        warps: Warps of a program.

    Returns:
        [1, N].
    """
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
        **dependent_launch.options(),
    )
    if splits > 1:
        sum_splits(into, out)
    return out
