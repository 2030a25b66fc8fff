"""MLA's absorbed GEMMs for few tokens, with weights kept in E4M3 with 128 x 128 block scales.

With few tokens the time goes into reading the weights: FP8 takes half the bytes of 16 bits.
Activations are not quantised. The codes are converted exactly to 16 bits in registers, and the sum
over each block is scaled. The reference is the GEMM with dequantised weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2


@triton.jit
def scaled_product(
    x,
    w,
    scales,
    out,
    head,
    column,
    rows,
    x_row,
    x_head,
    w_head,
    w_depth,
    w_column,
    s_head,
    s_depth,
    s_column,
    out_row,
    out_head,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute out[:, head, column : column + WIDTH] = x[:, head] w[head].

    x is [rows, H, SIZE], w is E4M3 [H, SIZE, COLUMNS]. SIZE is a multiple of the block size, and
    the WIDTH columns are in one block. Weights and scales are loaded before the wait for the kernel
    that makes x.
    """
    row, at, depth = tl.arange(0, ROWS), column + tl.arange(0, WIDTH), tl.arange(0, 128)
    inside = at < COLUMNS
    codes, factors = (), ()
    for part in tl.static_range(SIZE // 128):
        codes = codes + (  # type: ignore[assignment]
            tl.load(
                w
                + head * w_head
                + (part * 128 + depth)[:, None] * w_depth
                + at[None, :] * w_column,
                mask=inside[None, :],
                other=0.0,
            ),
        )
        factors = factors + (  # type: ignore[assignment]
            tl.load(scales + head * s_head + part * s_depth + column // 128 * s_column),
        )
    dependent_launch.wait(DEPENDENT)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for part in tl.static_range(SIZE // 128):
        a = tl.load(
            x + head * x_head + row[:, None] * x_row + (part * 128 + depth)[None, :],
            mask=(row < rows)[:, None],
            other=0.0,
        )
        total += tl.dot(a, codes[part].to(a.dtype), input_precision="ieee") * factors[part]
    tl.store(
        out + head * out_head + row[:, None] * out_row + at[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & inside[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def _by_heads_fp8(
    x,
    w,
    scales,
    out,
    rows,
    x_row,
    x_head,
    w_head,
    w_depth,
    w_column,
    s_head,
    s_depth,
    s_column,
    out_row,
    out_head,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute WIDTH columns of one head with :func:`scaled_product`."""
    dependent_launch.begin(DEPENDENT)
    scaled_product(
        x,
        w,
        scales,
        out,
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * WIDTH,
        rows,
        x_row,
        x_head,
        w_head,
        w_depth,
        w_column,
        s_head,
        s_depth,
        s_column,
        out_row,
        out_head,
        SIZE,
        COLUMNS,
        ROWS,
        WIDTH,
        DEPENDENT,
    )


def multiply(
    x: Tensor, weight: Blocks, out: Tensor, width: int, warps: int = 4, follows: bool = False
) -> None:
    """Multiply x [T, H, K] by weight [H, K, N] into out [T, H, N].

    K must be a multiple of the block size. x and out must be contiguous in their last dimension.

    Args:
        width: columns per program
        warps: warps per program
        follows: the preceding kernel waits for its predecessors as ``dependent_launch`` requires,
            so this one may start early
    """
    tokens, heads, size = x.shape
    columns = weight.values.shape[2]
    assert size % FP8_BLOCK == 0 and FP8_BLOCK % width == 0
    if tokens:
        _by_heads_fp8[(heads, cdiv(columns, width))](
            x,
            *weight,
            out,
            tokens,
            x.stride(0),
            x.stride(1),
            *weight.values.stride(),
            *weight.scales.stride(),
            out.stride(0),
            out.stride(1),
            SIZE=size,
            COLUMNS=columns,
            ROWS=max(16, next_power_of_2(tokens)),
            WIDTH=width,
            num_warps=warps,
            **(dependent_launch.options() if follows else {"DEPENDENT": False}),
        )
