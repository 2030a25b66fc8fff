"""Quantisation of activations to E4M3 with one float32 scale per token and 128 channels.

It is available alone and fused behind the gated activation (``elementwise.norm`` fuses it behind a
norm). Every function returns (values E4M3 [T, N], scales float32 [T, ceil(N / 128)]). Scales are
stored group-major: the scales of all tokens for one channel group are contiguous, padded to a
multiple of four tokens, which is the layout that TMA loads need. The last group of a token may be
ragged.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8_layout import empty_quantized as empty_quantized
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.rows import rows_of

#: groups per program in kernels where the groups of a token do not depend on each other
GROUPS_PER_PROGRAM = 8
GROUPS_PER_PROGRAM_MANY_TOKENS = 16  #: groups per program in such kernels with many tokens
MANY_TOKENS_MIN = 1024  #: tokens from which a batch counts as many
PAIR_ROWS = 2  #: rows per program of ``silu_and_mul_pairs``


@triton.jit
def quantize_rows(x):
    """Quantise float32 x [R, 128] to E4M3 [R, 128] and float32 scales [R].

    The largest value of a row becomes 448.
    """
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / 448.0
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def store_quantized(x, values, scales, row, group, column, size, scale_stride):
    """Quantise groups x float32 [G, 128] of a token and store them at ``column`` [G, 128]."""
    stored, scale = quantize_rows(x)
    tl.store(values + row * size + column, stored, mask=column < size)
    tl.store(scales + group * scale_stride + row, scale, mask=group * 128 < size)


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize(
    x, values, scales, x_stride, size, scale_stride, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Quantise GROUPS groups of 128 channels of one token."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    value = tl.load(x + row * x_stride + column, mask=column < size, other=0.0).to(tl.float32)
    store_quantized(value, values, scales, row, group, column, size, scale_stride)


@triton.jit(do_not_specialize=["scale_stride"])
def _silu_and_mul(
    x, values, scales, x_stride, size, scale_stride, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Compute and quantise GROUPS groups of 128 channels of silu(gate) * up for one token."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < size
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    store_quantized(
        gate / (1.0 + tl.exp(-gate)) * up, values, scales, row, group, column, size, scale_stride
    )


@triton.jit(do_not_specialize=["total_pairs", "scale_stride"])
def _silu_and_mul_pairs(
    x,
    pairs,
    filled,
    values,
    scales,
    total_pairs,
    x_stride,
    size,
    scale_stride,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute and quantise silu(gate) * up for ROWS rows, sorted by expert.

    Rows without a (token, expert) pair are neither read nor written.
    """
    at = tl.arange(0, ROWS * GROUPS)
    row, group = tl.program_id(0) * ROWS + at // GROUPS, tl.program_id(1) * GROUPS + at % GROUPS
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    if tl.program_id(0) * ROWS >= tl.load(filled):
        return
    real = tl.load(pairs + row) < total_pairs
    inside, line = real[:, None] & (column < size), row.to(tl.int64)[:, None]
    gate = tl.load(x + line * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + line * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    stored, scale = quantize_rows(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(values + line * size + column, stored, mask=inside)
    tl.store(
        scales + group.to(tl.int64) * scale_stride + row, scale, mask=real & (group * 128 < size)
    )


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [T, N] to E4M3 values and float32 scales; rows of x may be strided."""
    x = rows_of(x)
    rows, size = x.shape
    values, scales = empty_quantized(rows, size, x.device)
    if rows:
        groups = GROUPS_PER_PROGRAM if rows < MANY_TOKENS_MIN else GROUPS_PER_PROGRAM_MANY_TOKENS
        _quantize[(rows, cdiv(scales.shape[1], groups))](
            x,
            values,
            scales,
            x.stride(0),
            size,
            scales.stride(1),
            GROUPS=groups,
            num_warps=4,
            **dependent_launch.options(),
        )
    return values, scales


def silu_and_mul(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute silu(gate) * up for x [T, 2N], gate first, and quantise it from float32."""
    x = rows_of(x)
    rows = x.shape[0]
    size = x.shape[1] // 2
    values, scales = empty_quantized(rows, size, x.device)
    if rows:
        groups = GROUPS_PER_PROGRAM if rows < MANY_TOKENS_MIN else GROUPS_PER_PROGRAM_MANY_TOKENS
        _silu_and_mul[(rows, cdiv(scales.shape[1], groups))](
            x,
            values,
            scales,
            x.stride(0),
            size,
            scales.stride(1),
            GROUPS=groups,
            num_warps=4,
            **dependent_launch.options(),
        )
    return values, scales


def silu_and_mul_pairs(
    x: Tensor, pairs: Tensor, filled: Tensor, total_pairs: int
) -> tuple[Tensor, Tensor]:
    """Run ``silu_and_mul`` on rows sorted by expert, without the padding rows.

    Args:
        x: [R, 2N], R even
        pairs: int32 [R], the (token, expert) pair of each row; ``total_pairs`` or more: a padding
            row, which is not written
        filled: int32 [1]: number of rows in use, which come first; an even number
        total_pairs: number of pairs
    """
    x = rows_of(x)
    rows = x.shape[0]
    size = x.shape[1] // 2
    values, scales = empty_quantized(rows, size, x.device)
    groups = min(GROUPS_PER_PROGRAM_MANY_TOKENS, next_power_of_2(scales.shape[1]))
    _silu_and_mul_pairs[(rows // PAIR_ROWS, cdiv(scales.shape[1], groups))](
        x,
        pairs,
        filled,
        values,
        scales,
        total_pairs,
        x.stride(0),
        size,
        scales.stride(1),
        ROWS=PAIR_ROWS,
        GROUPS=groups,
        num_warps=4,
        **dependent_launch.options(),
    )
    return values, scales
