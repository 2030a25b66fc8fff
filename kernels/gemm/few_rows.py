"""GEMM for few tokens, y = x W^T (+ bias), limited by reading W.

A program holds its rows of W, all columns, in registers. It loads them before it waits for the
kernel that computes x (programmatic dependent launch). x is [T, K], W [N, K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2


class Tile(NamedTuple):
    """Tile of a GEMM for few tokens: the work of one program.

    Attributes:
        rows: Number of rows of W per program.
        splits: Number of splits of the columns of W among warps, which use the tensor cores; 0: no
            tensor cores, one token is summed after another.
        tokens: Number of tokens per program.
        warps: Number of warps per program.
    """

    rows: int
    splits: int
    tokens: int
    warps: int


@triton.jit
def _vector(
    x,
    w,
    bias,
    out,
    size,
    depth,
    x_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute ``ROWS`` columns of ``out`` for all tokens, without tensor cores."""
    dependent_launch.begin(DEPENDENT)
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    held = tl.load(
        w + row.to(tl.int64)[:, None] * depth + at[None, :],
        mask=(row < size)[:, None] & (at < depth)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    dependent_launch.wait(DEPENDENT)
    for token in tl.static_range(TOKENS):
        value = tl.load(x + token * x_stride + at, mask=at < depth, other=0.0)
        total = tl.sum(held.to(tl.float32) * value.to(tl.float32)[None, :], 1)
        if BIAS:
            total += tl.load(bias + row, mask=row < size, other=0.0).to(tl.float32)
        tl.store(out + token * size + row, total.to(out.dtype.element_ty), mask=row < size)


@triton.jit
def _matrix(
    x,
    w,
    bias,
    out,
    tokens,
    size,
    depth,
    x_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute ``ROWS`` columns of ``out`` for ``TOKENS`` tokens with tensor cores.

    The warps share ``SPLITS`` splits of the depth.
    """
    dependent_launch.begin(DEPENDENT)
    row, token = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * TOKENS + tl.arange(0, TOKENS),
    )
    first, at = tl.arange(0, SPLITS)[:, None, None] * DEPTH, tl.arange(0, DEPTH)
    w_at = first + at[None, None, :]
    held = tl.load(
        w + row.to(tl.int64)[None, :, None] * depth + w_at,
        mask=(row < size)[None, :, None] & (w_at < depth),
        other=0.0,
        eviction_policy="evict_first",
    )
    dependent_launch.wait(DEPENDENT)
    x_at = first + at[None, :, None]
    value = tl.load(
        x + token.to(tl.int64)[None, None, :] * x_stride + x_at,
        mask=(token < tokens)[None, None, :] & (x_at < depth),
        other=0.0,
    )
    total = tl.sum(tl.dot(held, value, input_precision="ieee"), 0)
    if BIAS:
        total += tl.load(bias + row, mask=row < size, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + token.to(tl.int64)[None, :] * size + row[:, None],
        total.to(out.dtype.element_ty),
        mask=(row < size)[:, None] & (token < tokens)[None, :],
    )


TOKENS_MAX = 16  #: most tokens at which a tile here may beat cuBLAS
#: elements of W from which cuBLAS is faster for two and more tokens
CUBLAS_WEIGHT_ELEMENTS = 40 << 20
#: depth up to which 4 warps hold a tile of W for up to 8 tokens, with more 8. On an H200, norm
#: included, 2048 rows of 1024 columns take 5.2 us with 8 warps and 3.5 with 4, but those of 2048
#: columns 5.2 and 10.1
FOUR_WARPS_DEPTH_MAX = 1024


def few_rows_tile(tokens: int, size: int, depth: int) -> Tile | None:
    """Return the tile for 16-bit x [tokens, depth] and W [size, depth]; None: use cuBLAS.

    Measured on an H200 for two of V2-Lite's layers, after a norm, cuBLAS -> tile: 7.9 -> 5.4 and
    7.8 -> 3.7 us for one token, 8.6 -> 6.9 and 7.9 -> 5.1 us for eight. Tiles are slower for the
    first GEMM of its dense layer (21,888 rows, 44.8 million elements), norm included: 27.0 -> 40.4
    us for four tokens, 27.3 -> 43.4 us for eight. ``CUBLAS_WEIGHT_ELEMENTS``, from which cuBLAS is
    used, is below the size of that layer and above that of the largest unmeasured layer of
    DeepSeek's models (24,576 rows of 1,536).
    """
    if tokens == 1 and depth <= 16384:
        return Tile(4, 0, 1, 4) if depth <= 4096 else Tile(2, 0, 1, 8)
    if not 128 <= depth <= 2048 or size * depth >= CUBLAS_WEIGHT_ELEMENTS:
        return None
    if tokens <= 8:
        return Tile(16, 8, 8, 4 if depth <= FOUR_WARPS_DEPTH_MAX else 8)
    return Tile(16, 8, 16, 8) if tokens <= TOKENS_MAX and size <= 16 * MULTIPROCESSORS else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Compute x W^T (+ bias), accumulated in float32.

    Args:
        x: [T, K]; rows may be strided.
        weight: [N, K], contiguous.
        bias: [N] or None.
        tile: The result of :func:`few_rows_tile`.

    Returns:
        [T, N].
    """
    tokens, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    added = weight if bias is None else bias
    programs = cdiv(size, tile.rows)
    if not tokens:
        return out
    if tile.splits:
        columns = max(16, next_power_of_2(cdiv(depth, tile.splits)))
        _matrix[(programs, cdiv(tokens, tile.tokens))](
            x,
            weight,
            added,
            out,
            tokens,
            size,
            depth,
            x.stride(0),
            TOKENS=tile.tokens,
            ROWS=tile.rows,
            SPLITS=tile.splits,
            DEPTH=columns,
            BIAS=bias is not None,
            num_warps=tile.warps,
            **dependent_launch.options(),
        )
    else:
        _vector[(programs,)](
            x,
            weight,
            added,
            out,
            size,
            depth,
            x.stride(0),
            TOKENS=tokens,
            ROWS=tile.rows,
            DEPTH=next_power_of_2(depth),
            BIAS=bias is not None,
            num_warps=tile.warps,
            **dependent_launch.options(),
        )
    return out
