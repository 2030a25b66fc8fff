"""Root-mean-square normalisation, alone and with the residual add before it: one program a token."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton import dependent


@triton.jit
def _rms_norm(x, weight, out, x_stride, size, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    dependent.wait(DEPENDENT)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(out + row * size + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(x, residual, weight, out, total, x_stride, residual_stride, size, eps, BLOCK: tl.constexpr,
                  DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    dependent.wait(DEPENDENT)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row * size + at, rounded, mask=inside)
    value = rounded.to(tl.float32)  # what the next layer will read, not what the sum was before rounding
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(out + row * size + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rows_of(x: Tensor) -> Tensor:
    """x [..., N] as [rows, N] whose last dimension is contiguous; rows may be strided."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def warps_for(block: int) -> int:
    """Warps of a program that reduces ``block`` elements."""
    return 4 if block <= 1024 else 8 if block <= 4096 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> x / sqrt(mean(x^2) + eps) * weight, rounded once to x's dtype."""
    flat = rows_of(x)
    rows, size = flat.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](flat, weight, out, flat.stride(0), size, eps, BLOCK=block, num_warps=warps_for(block),
                           **dependent.options())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x), the norm being of the rounded sum. Neither argument is written."""
    flat, before = rows_of(x), rows_of(residual)
    rows, size = flat.shape
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        block = triton.next_power_of_2(size)
        _add_rms_norm[(rows,)](flat, before, weight, out, total, flat.stride(0), before.stride(0), size, eps,
                               BLOCK=block, num_warps=warps_for(block),
                               **dependent.options())
    return out, total
