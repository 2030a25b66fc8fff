"""y = x W^T (+ bias) for few rows of x, where fetching W is all the time it takes.

A program holds its rows of W, all columns, in registers. It asks for them before it waits for the
kernel that computes x, so that they are on their way meanwhile. T tokens, W [N, K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2


class Tile(NamedTuple):
    """How a product is cut: rows of W a program, into how many parts warps share out its columns
    for the tensor cores (0: none, one token after the other is summed without them), tokens a
    program, warps."""

    rows: int
    parts: int
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
    dependent.begin(DEPENDENT)
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    held = tl.load(
        w + row.to(tl.int64)[:, None] * depth + at[None, :],
        mask=(row < size)[:, None] & (at < depth)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    dependent.wait(DEPENDENT)
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
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dependent.begin(DEPENDENT)
    row, token = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * TOKENS + tl.arange(0, TOKENS),
    )
    first, at = tl.arange(0, PARTS)[:, None, None] * DEPTH, tl.arange(0, DEPTH)
    w_at = first + at[None, None, :]
    held = tl.load(
        w + row.to(tl.int64)[None, :, None] * depth + w_at,
        mask=(row < size)[None, :, None] & (w_at < depth),
        other=0.0,
        eviction_policy="evict_first",
    )
    dependent.wait(DEPENDENT)
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


MOST = 16  #: tokens from which on nothing here beats cuBLAS
LARGE = 40 << 20  #: numbers of W from which on cuBLAS is quicker for two tokens and more


def rule(tokens: int, size: int, depth: int) -> Tile | None:
    """The tile for x [tokens, depth] and W [size, depth] of two bytes a number; None: cuBLAS does
    it as fast.

    Measured on an H200 for V2-Lite's layers, behind a norm: 7.9 -> 5.4 and 7.8 -> 3.7 us for one
    token, 8.6 -> 6.9 and
    7.9 -> 5.1 for eight. Of its dense layer's first product (21,888 rows, 44.8 million numbers) the
    tile for eight tokens takes 40.4 us with four and 43.4 with eight, cuBLAS 27.0 and 27.3, norm
    included; LARGE lies below that one and above what of DeepSeek's layers was not measured (24,576
    rows of 1,536 numbers are the next).
    """
    if tokens == 1 and depth <= 16384:
        return Tile(4, 0, 1, 4) if depth <= 4096 else Tile(2, 0, 1, 8)
    if not 128 <= depth <= 2048 or size * depth >= LARGE:
        return None
    if tokens <= 8:
        return Tile(16, 8, 8, 8)
    return Tile(16, 8, 16, 8) if tokens <= MOST and size <= 16 * MULTIPROCESSORS else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """x [T, K] (rows may be strided) times weight [N, K], contiguous, transposed: [T, N], summed in
    float32.
    """
    tokens, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    added = weight if bias is None else bias
    programs = cdiv(size, tile.rows)
    if not tokens:
        return out
    if tile.parts:
        columns = max(16, next_power_of_2(cdiv(depth, tile.parts)))
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
            PARTS=tile.parts,
            DEPTH=columns,
            BIAS=bias is not None,
            num_warps=tile.warps,
            **dependent.options(),
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
            **dependent.options(),
        )
    return out
