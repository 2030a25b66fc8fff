"""Quantisation of activations to int8 with one float32 scale per token.

It is available alone and fused behind the kernels that produce activations. Every function returns
(values int8 [T, N], scales float32 [T]). A program holds one token in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.launch.rows import rows_of


@triton.jit
def _store(x, values, scales, row, column, size):
    """Quantise and store one token x, padded with zeros to a power of two.

    Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    """
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-10) / 127.0
    rounded = x / scale + 12582912.0
    tl.store(values + row * size + column, (rounded - 12582912.0).to(tl.int8), mask=column < size)
    tl.store(scales + row, scale)


@triton.jit
def _quantize(x, values, scales, x_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Quantise one token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    value = tl.load(x + row * x_stride + column, mask=column < size, other=0.0).to(tl.float32)
    _store(value, values, scales, row, column, size)


@triton.jit
def _silu_and_mul(x, values, scales, x_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Compute and quantise silu(gate) * up for one token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    _store(gate / (1.0 + tl.exp(-gate)) * up, values, scales, row, column, size)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    total,
    plain,
    values,
    scales,
    x_stride,
    residual_stride,
    size,
    eps,
    ADD: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Normalise one token, after adding the residual if ADD, and quantise it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dependent_launch.begin(DEPENDENT)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dependent_launch.wait(DEPENDENT)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        # the next layer reads the rounded sum
        value = rounded.to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    normed = value * root * gain
    if BOTH:
        tl.store(plain + row * size + column, normed.to(plain.dtype.element_ty), mask=inside)
    _store(normed, values, scales, row, column, size)


def empty_quantized(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate values int8 [rows, size] and scales float32 [rows]."""
    values = torch.empty(rows, size, dtype=torch.int8, device=device)
    return values, torch.empty(rows, device=device)


def _launch_options(size: int) -> dict[str, int]:
    """Return the launch options of programs that each hold a token of ``size`` channels."""
    block = next_power_of_2(size)
    return {
        "BLOCK": block,
        "num_warps": 2 if block <= 512 else 4 if block <= 2048 else 8 if block <= 4096 else 16,
    }


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [T, N] to int8 values and float32 scales; rows of x may be strided."""
    x = rows_of(x)
    rows, size = x.shape
    values, scales = empty_quantized(rows, size, x.device)
    if rows:
        _quantize[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            size,
            **_launch_options(size),
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
        _silu_and_mul[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            size,
            **_launch_options(size),
            **dependent_launch.options(),
        )
    return values, scales


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, plain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute x / sqrt(mean(x^2) + eps) * weight for x [T, N] and quantise it from float32.

    The unquantised norm is also written to ``plain`` [T, N] if that is given.
    """
    x = rows_of(x)
    rows, size = x.shape
    values, scales = empty_quantized(rows, size, x.device)
    if rows:
        _rms_norm[(rows,)](
            x,
            x,
            weight,
            x,
            x if plain is None else plain,
            values,
            scales,
            x.stride(0),
            0,
            size,
            eps,
            ADD=False,
            BOTH=plain is not None,
            **_launch_options(size),
            **dependent_launch.options(),
        )
    return values, scales


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    plain: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the quantised :func:`rms_norm` of x + residual, and the sum itself.

    Args:
        x: [T, N], may be float32; not written
        residual: [T, N]; not written. The sum is rounded to its dtype before the norm
        weight: [N]
        eps: epsilon of the norm
        plain: [T, N], receives the unquantised norm; None: not stored
    """
    x = rows_of(x)
    residual = rows_of(residual)
    rows, size = x.shape
    values, scales = empty_quantized(rows, size, x.device)
    total = torch.empty(rows, size, dtype=residual.dtype, device=x.device)
    if rows:
        _rms_norm[(rows,)](
            x,
            residual,
            weight,
            total,
            total if plain is None else plain,
            values,
            scales,
            x.stride(0),
            residual.stride(0),
            size,
            eps,
            ADD=True,
            BOTH=plain is not None,
            **_launch_options(size),
            **dependent_launch.options(),
        )
    return (values, scales), total
