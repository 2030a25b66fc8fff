"""Block-scaled FP8 GEMM, y = x W^T: x E4M3 in groups of 128 channels, W E4M3 in 128x128 blocks.

The sum over each 128-deep group is scaled and accumulated in float32. N and K may be ragged. Few
rows are multiplied as (W x^T)^T (``SWAP``): the weight is then the M side of a warpgroup MMA and
the tokens its narrow N side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm import few_rows_fp8
from glowplug.kernels.gemm.split_k import splits_for, sum_splits
from glowplug.kernels.launch import dependent_launch, tuned_tables
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config

#: depth groups of weights that a program prefetches, for few tokens, while the previous kernel ends
PREFETCH_GROUPS = 4


@triton.jit
def load_tile(at, group, depth, EVEN: tl.constexpr):
    """Load depth group ``group``, 128 columns, of the rows at ``at`` [R, 128].

    Columns beyond ``depth`` are zeros.
    """
    if EVEN:
        tile = tl.load(at + group * 128)
    else:
        tile = tl.load(
            at + group * 128, mask=(group * 128 + tl.arange(0, 128) < depth)[None, :], other=0.0
        )
    return tile


@triton.jit
def load_weight(weight, row, at, group, depth, TMA: tl.constexpr, EVEN: tl.constexpr):
    """Load a depth group of a weight: by TMA descriptor from ``row`` on, or at pointers ``at``."""
    if TMA:
        tile = weight.load([row, group * 128])
    else:
        tile = load_tile(at, group, depth, EVEN)
    return tile


@triton.jit
def add_scaled(total, x, weight, x_scale, w_scale, ROW_SCALES: tl.constexpr, SWAP: tl.constexpr):
    """Return total + the scaled result of x [M, 128] times weight [N, 128].

    ``total`` is [M, N], with ``SWAP`` [N, M]. ``x_scale`` is [M]. ``w_scale`` is one number, with
    ``ROW_SCALES`` [N].
    """
    if SWAP:
        product = tl.dot(weight, x.T)
        if ROW_SCALES:
            total += product * (w_scale[:, None] * x_scale[None, :])
        else:
            total += product * (x_scale * w_scale)[None, :]
    else:
        product = tl.dot(x, weight.T)
        if ROW_SCALES:
            total += product * (x_scale[:, None] * w_scale[None, :])
        else:
            total += product * (x_scale * w_scale)[:, None]
    return total


@triton.jit
def fetch_weight(weight, first, rows, group, depth, BLOCK_N: tl.constexpr, FETCH: tl.constexpr):
    """Prefetch ``FETCH`` depth groups, from ``group`` on, of ``BLOCK_N`` weight rows into L2.

    For use before ``dependent_launch.wait``, when nothing else can run.
    """
    row = tl.minimum(first + tl.arange(0, BLOCK_N), rows - 1).to(tl.int64)
    column = tl.minimum((group + tl.arange(0, FETCH)) * 128, depth - 1)
    dependent_launch.fetch(weight + row[:, None] * depth + column[None, :])


@triton.jit(do_not_specialize=["rows", "xs_stride", "ws_stride"])
def _gemm(
    x,
    x_scales,
    weight,
    stored,
    w_scales,
    out,
    rows,
    columns,
    depth,
    x_stride,
    xs_stride,
    ws_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    FETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of the output over one depth split.

    The second grid index is the number of the split. ``weight`` is ``stored`` or its TMA
    descriptor.
    """
    dependent_launch.begin(DEPENDENT)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    first_row = tile % tiles_m * BLOCK_M
    first_column = tile // tiles_m * BLOCK_N
    groups = tl.cdiv(depth, 128)
    start = groups * tl.program_id(1) // tl.num_programs(1)
    end = groups * (tl.program_id(1) + 1) // tl.num_programs(1)
    if DEPENDENT and FETCH:
        fetch_weight(stored, first_column, columns, start, depth, BLOCK_N, FETCH)

    m = first_row + tl.arange(0, BLOCK_M)
    n = first_column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    real = m < rows
    x_at = x + tl.where(real, m, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    xs_at = x_scales + tl.where(real, m, 0)
    w_at = stored + tl.where(n < columns, n, 0).to(tl.int64)[:, None] * depth + k[None, :]
    if ROW_SCALES:
        ws_at = w_scales + tl.where(n < columns, n, 0) * ws_stride
    else:
        ws_at = w_scales + first_column // 128 * ws_stride
    w_scale = tl.load(ws_at + start)
    dependent_launch.wait(DEPENDENT)
    x_scale = tl.load(xs_at + start * xs_stride)
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(start, end):
        ahead = tl.minimum(group + 1, groups - 1)
        next_x_scale = tl.load(xs_at + ahead * xs_stride)
        next_w_scale = tl.load(ws_at + ahead)
        x_tile = load_tile(x_at, group, depth, EVEN)
        w_tile = load_weight(weight, first_column, w_at, group, depth, TMA, EVEN)
        total = add_scaled(total, x_tile, w_tile, x_scale, w_scale, ROW_SCALES, SWAP)
        x_scale = next_x_scale
        w_scale = next_w_scale
    if SWAP:
        total = total.T
    out_at = out + (tl.program_id(1) * rows + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=real[:, None] & (n < columns)[None, :])


def fp8_gemm_rule(rows: int, columns: int, depth: int) -> Config:
    """Return a configuration by rule for x [rows, depth] and W [columns, depth].

    It is for sizes without a tuned table. Few rows get enough programs to read the weight with
    every multiprocessor.
    """
    if rows > 64:
        return {
            "BLOCK_M": 128,
            "BLOCK_N": 128,
            "SPLIT_K": 1,
            "SWAP": False,
            "TMA": False,
            "num_warps": 8,
            "num_stages": 4,
        }
    block_m = max(16, next_power_of_2(rows))
    split = splits_for(columns // 64, depth, MULTIPROCESSORS)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 64,
        "SPLIT_K": split,
        "SWAP": True,
        "TMA": False,
        "num_warps": 4,
        "num_stages": 5,
    }


@lru_cache(maxsize=4096)
def fp8_gemm_config(rows: int, columns: int, depth: int) -> Config:
    """Return the configuration for x [rows, depth] and W [columns, depth].

    With a tuned table it is the entry for the nearest number of rows, otherwise the result of
    :func:`fp8_gemm_rule`. It holds the tile sizes of ``_gemm``. If it has the key ``HELD``, it is
    for ``gemm.few_rows_fp8`` instead and holds the weight rows of a program (``HELD``), the number
    of depth splits (``SPLIT_K``) and the number of warps.
    """
    name = tuned_tables.file_name(
        tuned_tables.problem(columns, depth), tuned_tables.FP8, (FP8_BLOCK, FP8_BLOCK)
    )
    return tuned_tables.measured_for(
        name,
        rows,
        lambda config: "HELD" not in config or few_rows_fp8.held_rows_fit(rows, config["HELD"]),
    ) or fp8_gemm_rule(rows, columns, depth)


def gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """Compute x W^T: [M, N].

    Args:
        x: E4M3 [M, K].
        x_scales: float32 [M, ceil(K / 128)], column-major.
        weight: E4M3 [N, K].
        w_scales: float32 [ceil(N / 128), ceil(K / 128)], or [N, ceil(K / 128)] for scales by row.
        dtype: Result's dtype.
        config: Tiles; None: those of :func:`fp8_gemm_config`.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    if not rows:
        return torch.empty(0, columns, dtype=dtype, device=x.device)
    chosen: dict[str, Any] = dict(config or fp8_gemm_config(rows, columns, depth))
    row_scales = w_scales.shape[0] == columns and columns > 1
    if "HELD" in chosen and row_scales:
        chosen = dict(fp8_gemm_rule(rows, columns, depth))
    elif "HELD" in chosen:
        return few_rows_fp8.multiply(
            x,
            x_scales,
            weight,
            w_scales,
            dtype,
            chosen["HELD"],
            chosen["SPLIT_K"],
            chosen["num_warps"],
        )
    split = chosen.pop("SPLIT_K")
    block_n = chosen["BLOCK_N"]
    chosen["TMA"] = chosen["TMA"] and depth % 16 == 0
    chosen.setdefault("FETCH", PREFETCH_GROUPS if rows <= chosen["BLOCK_M"] <= 32 else 0)
    weight_operand = (
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [block_n, FP8_BLOCK])
        if chosen["TMA"]
        else weight
    )
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    into = (
        out
        if split == 1
        else torch.empty(split, rows, columns, dtype=torch.float32, device=x.device)
    )
    grid = (cdiv(rows, chosen["BLOCK_M"]) * cdiv(columns, block_n), split)
    _gemm[grid](
        x,
        x_scales,
        weight_operand,
        weight,
        w_scales,
        into,
        rows,
        columns,
        depth,
        x.stride(0),
        x_scales.stride(1),
        w_scales.stride(0),
        columns,
        ROW_SCALES=row_scales,
        EVEN=depth % FP8_BLOCK == 0,
        **chosen,
        **dependent_launch.options(),
    )
    if split > 1:
        sum_splits(into, out)
    return out
