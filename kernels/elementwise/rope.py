"""Rotary position embedding of queries and keys in one launch.

Frequencies and tables are those of ``kernels.elementwise.rope_reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

PROGRAM_ELEMENTS = 2048  #: approximate number of elements that one program rotates


@triton.jit
def _turn(
    x,
    out,
    cos_sin,
    head_stride,
    heads,
    first,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate heads ``first`` to ``first + HEADS`` of one token; x and out point at the token."""
    pair = tl.arange(0, HALF)
    head = first + tl.arange(0, HEADS)
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    cos = tl.load(cos_sin + pair, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(cos_sin + half + pair, mask=pair < half, other=0.0)[None, :]
    if INTERLEAVED:
        left, right = pair * 2, pair * 2 + 1
    else:
        left, right = pair, pair + half
    source = x + (head * head_stride)[:, None]
    target = out + (head * half * 2)[:, None]
    a = tl.load(source + left[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + right[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + left[None, :], (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + right[None, :], (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope(
    q,
    k,
    q_out,
    k_out,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    q_heads,
    k_heads,
    half,
    q_blocks,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rotate HEADS query heads or key heads of one token."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = cos_sin + token * half * 2
    if block < q_blocks:
        _turn(
            q + token * q_token,
            q_out + token * q_heads * half * 2,
            row,
            q_head,
            q_heads,
            block * HEADS,
            half,
            HEADS,
            HALF,
            INTERLEAVED,
        )
    else:
        _turn(
            k + token * k_token,
            k_out + token * k_heads * half * 2,
            row,
            k_head,
            k_heads,
            (block - q_blocks) * HEADS,
            half,
            HEADS,
            HALF,
            INTERLEAVED,
        )


def _contiguous_last(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rotate(q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; the results are contiguous and in the dtypes of the arguments.

    Args:
        q: [T, H, R]; H may be 0
        k: [T, G, R]; G may be 0
        cos_sin: float32 [T, R]: cosines, then sines, of each token's position
        interleaved: rotate neighbouring elements; otherwise element i with i + R / 2
    """
    q = _contiguous_last(q)
    k = _contiguous_last(k)
    tokens, q_heads, size = q.shape
    k_heads = k.shape[1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    half = next_power_of_2(size // 2)
    most = next_power_of_2(max(q_heads, k_heads, 1))
    heads = min(most, max(1, PROGRAM_ELEMENTS // half))
    q_blocks = cdiv(q_heads, heads)
    k_blocks = cdiv(k_heads, heads)
    if tokens and q_blocks + k_blocks:
        _rope[(tokens, q_blocks + k_blocks)](
            q,
            k,
            q_out,
            k_out,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            q_heads,
            k_heads,
            size // 2,
            q_blocks,
            HEADS=heads,
            HALF=half,
            INTERLEAVED=interleaved,
            **dependent_launch.options(),
        )
    return q_out, k_out
