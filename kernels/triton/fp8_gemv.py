"""Block-scaled FP8 product of a single token: a program multiplies a few rows of the weight straight from registers.

Scales of x and of the weight's blocks are folded into x, since a program's rows lie in one block.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton import dependent
from glowplug.kernels.triton.tuned import Config


@triton.jit
def _gemv(x, x_scales, weight, w_scales, out, columns, depth, xs_stride, ws_stride,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = weight + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * depth + k[None, :]
    ws_at = w_scales + tl.program_id(0) * BLOCK_N // 128 * ws_stride
    ahead = tl.load(w_at, mask=(k < depth)[None, :], other=0.0)
    dependent.wait(DEPENDENT)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, depth, BLOCK_K):
        stored = ahead
        further = start + BLOCK_K + k
        ahead = tl.load(w_at + start + BLOCK_K, mask=(further < depth)[None, :], other=0.0)
        inside = start + k < depth
        group = (start + k) // 128
        value = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        value *= tl.load(x_scales + group * xs_stride, mask=inside, other=0.0)
        value *= tl.load(ws_at + group, mask=inside, other=0.0)
        total += stored.to(tl.float32) * value[None, :]
    tl.store(out + n, tl.sum(total, 1).to(out.dtype.element_ty), mask=n < columns)


def gemv(x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype, config: Config) -> Tensor:
    """As ``fp8_gemm.gemm`` for x [1, K] and scales of whole blocks. ``BLOCK_N`` divides 128."""
    columns, depth = weight.shape
    out = torch.empty(1, columns, dtype=dtype, device=x.device)
    _gemv[(triton.cdiv(columns, config["BLOCK_N"]),)](
        x, x_scales, weight, w_scales, out, columns, depth, x_scales.stride(1), w_scales.stride(0), **config,
        **dependent.options())
    return out
