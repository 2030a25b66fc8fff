"""Int8 GEMM, y = x W^T: x int8 with one scale per token, W int8 [N, K] with one per row.

Sums are exact in int32 and scaled once. Few rows are multiplied as (W x^T)^T (``SWAP``): the weight
is then the M side of a warpgroup MMA and the tokens its narrow N side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.gemm.split_k import splits_for
from glowplug.kernels.launch import dependent_launch, tuned_tables
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config

DTYPE = "int8_w8a8"


@triton.jit
def load_tile(at, first, depth, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load ``BLOCK_K`` columns from ``first`` on of the rows at ``at``; zeros beyond ``depth``."""
    if EVEN:
        tile = tl.load(at + first)
    else:
        tile = tl.load(at + first, mask=(first + tl.arange(0, BLOCK_K) < depth)[None, :], other=0)
    return tile


@triton.jit
def times(x, w, total, SWAP: tl.constexpr):
    """Return total + x w^T, with ``SWAP`` total + w x^T, int32."""
    if SWAP:
        total = tl.dot(w, tl.trans(x), total, out_dtype=tl.int32)
    else:
        total = tl.dot(x, tl.trans(w), total, out_dtype=tl.int32)
    return total


@triton.jit
def zeros_of(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """Return an int32 accumulator of zeros, [M, N], with ``SWAP`` [N, M]."""
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    return total


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x,
    x_scales,
    weight,
    w_scales,
    bias,
    out,
    rows,
    columns,
    depth,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of the output over one depth split.

    The second grid index is the number of the split. With ``SPLIT`` the unscaled sums are
    stored, int32 [splits, M, N].
    """
    dependent_launch.begin(DEPENDENT)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(depth, BLOCK_K)
    start = steps * tl.program_id(1) // tl.num_programs(1)
    end = steps * (tl.program_id(1) + 1) // tl.num_programs(1)
    real = m < rows
    x_at = x + tl.where(real, m, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + tl.where(n < columns, n, 0).to(tl.int64)[:, None] * depth + k[None, :]
    total = zeros_of(BLOCK_M, BLOCK_N, SWAP)
    dependent_launch.wait(DEPENDENT)
    for step in range(start, end):
        x_tile = load_tile(x_at, step * BLOCK_K, depth, EVEN, BLOCK_K)
        w_tile = load_tile(w_at, step * BLOCK_K, depth, EVEN, BLOCK_K)
        total = times(x_tile, w_tile, total, SWAP)
    if SWAP:
        total = tl.trans(total)
    at = (tl.program_id(1) * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    inside = real[:, None] & (n < columns)[None, :]
    if SPLIT:
        tl.store(out + at, total, mask=inside)
    else:
        y = total.to(tl.float32) * tl.load(x_scales + m, mask=real, other=0.0)[:, None]
        y *= tl.load(w_scales + n, mask=n < columns, other=0.0)[None, :]
        if BIAS:
            y += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "count"])
def _finish(
    splits,
    x_scales,
    w_scales,
    bias,
    out,
    rows,
    columns,
    count,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Store out [M, N], the scaled sum of splits int32 [count, M, N]."""
    dependent_launch.begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < columns
    scale = tl.load(w_scales + n, mask=inside, other=0.0)
    dependent_launch.wait(DEPENDENT)
    total = tl.zeros((BLOCK,), tl.int32)
    for split in range(count):
        total += tl.load(splits + (split * rows + row) * columns + n, mask=inside, other=0)
    y = total.to(tl.float32) * tl.load(x_scales + row) * scale
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + n, y.to(out.dtype.element_ty), mask=inside)


def int8_gemm_rule(rows: int, columns: int, depth: int) -> Config:
    """Return a configuration by rule for x [rows, depth] and W [columns, depth].

    It is for sizes without a tuned table, and gives enough programs to read the weight with every
    multiprocessor.
    """
    few = rows <= 256
    # a BLOCK_M of 16 was measured slower, even for one row
    block_m = min(64, max(32, next_power_of_2(rows))) if few else 128
    split = splits_for(
        cdiv(rows, block_m) * cdiv(columns, 64 if few else 128), depth, MULTIPROCESSORS
    )
    if few:
        return {
            "BLOCK_M": block_m,
            "BLOCK_N": 64,
            "BLOCK_K": 128,
            "SPLIT_K": split,
            "SWAP": True,
            "num_warps": 4,
            "num_stages": 5,
        }
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "SPLIT_K": split,
        "SWAP": False,
        "num_warps": 8,
        "num_stages": 3,
    }


@lru_cache(maxsize=4096)
def int8_gemm_config(rows: int, columns: int, depth: int) -> Config:
    """Return the tuned configuration for the nearest number of rows; if none fits, the rule's.

    The GEMM multiplies x [rows, depth] by W [columns, depth]^T.
    """
    return tuned_tables.measured_for(
        tuned_tables.file_name(tuned_tables.problem(columns, depth), DTYPE), rows
    ) or int8_gemm_rule(rows, columns, depth)


def gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute x W^T (+ bias).

    Args:
        x: int8 [M, K].
        x_scales: float32 [M].
        weight: int8 [N, K].
        w_scales: float32 [N].
        dtype: Result's dtype.
        bias: [N] or None.
        config: Tiles; None: those of :func:`int8_gemm_config`.

    Returns:
        [M, N].
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if not rows:
        return out
    chosen: dict[str, Any] = dict(config or int8_gemm_config(rows, columns, depth))
    split = chosen.pop("SPLIT_K")
    into = (
        out if split == 1 else torch.empty(split, rows, columns, dtype=torch.int32, device=x.device)
    )
    added = w_scales if bias is None else bias
    _gemm[(cdiv(rows, chosen["BLOCK_M"]) * cdiv(columns, chosen["BLOCK_N"]), split)](
        x,
        x_scales,
        weight,
        w_scales,
        added,
        into,
        rows,
        columns,
        depth,
        x.stride(0),
        EVEN=depth % chosen["BLOCK_K"] == 0,
        BIAS=bias is not None,
        SPLIT=split > 1,
        **chosen,
        **dependent_launch.options(),
    )
    if split > 1:
        _finish[(rows, cdiv(columns, 512))](
            into,
            x_scales,
            w_scales,
            added,
            out,
            rows,
            columns,
            split,
            BIAS=bias is not None,
            BLOCK=512,
            **dependent_launch.options(),
        )
    return out
