"""Ragged attention over expanded keys and values, for MLA prefill.

Scores are over N + R numbers, values have V. The loop is FlashAttention-2's (Dao, 2023): a block of
queries of one row against its keys tile by tile; tiles that every query of the block sees in full
need no mask. The rotary part of the keys is a separate tensor, so that one part for all heads need
not be copied to each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2

LOG2_E = 1.4426950408889634


@triton.jit
def _tiles(
    acc,
    top,
    total,
    q_n,
    q_r,
    k_nope,
    k_rope,
    v,
    low,
    high,
    keys,
    last,
    scale,
    kn_stride,
    kr_stride,
    v_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continue the attention of a block of queries with the keys ``low`` to ``high``.

    The keys are read in tiles of ``BLOCK_K``. The row has ``keys`` keys; query i sees those up to
    number ``last[i]``.
    """
    n, r, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    j = tl.arange(0, BLOCK_K)
    for first in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        at = (first + j).to(tl.int64)
        inside = (at < keys)[:, None]
        if MASKED or N != BLOCK_N or R != BLOCK_R or V != BLOCK_V:
            key_n = tl.load(
                k_nope + at[:, None] * kn_stride + n[None, :],
                mask=inside & (n < N)[None, :],
                other=0.0,
            )
            key_r = tl.load(
                k_rope + at[:, None] * kr_stride + r[None, :],
                mask=inside & (r < R)[None, :],
                other=0.0,
            )
            value = tl.load(
                v + at[:, None] * v_stride + d[None, :], mask=inside & (d < V)[None, :], other=0.0
            )
        else:
            key_n = tl.load(k_nope + at[:, None] * kn_stride + n[None, :])
            key_r = tl.load(k_rope + at[:, None] * kr_stride + r[None, :])
            value = tl.load(v + at[:, None] * v_stride + d[None, :])
        scores = tl.dot(q_n, tl.trans(key_n), input_precision=PRECISION)
        scores = tl.dot(q_r, tl.trans(key_r), scores, input_precision=PRECISION)
        if MASKED:
            scores = tl.where((first + j)[None, :] <= last[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
            base = higher
        weights = tl.exp2(scores * scale - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["heads"])
def mla_prefill_kernel(
    q,
    k_nope,
    k_rope,
    v,
    out,
    lse,
    q_starts,
    k_starts,
    scale,
    heads,
    q_stride,
    q_head,
    kn_stride,
    kn_head,
    kr_stride,
    kr_head,
    v_stride,
    v_head,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend ``BLOCK_Q`` queries of one row and head to the keys of the row.

    The last blocks of a row run first, since they see the most keys. ``scale`` includes log2(e).
    lse float32 [token, head] is the natural logarithm, -inf where a query sees no key.
    """
    block, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_first, k_first = tl.load(q_starts + row).to(tl.int64), tl.load(k_starts + row).to(tl.int64)
    queries = (tl.load(q_starts + row + 1) - q_first).to(tl.int32)
    keys = (tl.load(k_starts + row + 1) - k_first).to(tl.int32)
    if block * BLOCK_Q >= queries:
        return
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    n, r, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    token = (q_first + i)[:, None]
    q += head * q_head
    q_n = tl.load(
        q + token * q_stride + n[None, :], mask=(i < queries)[:, None] & (n < N)[None, :], other=0.0
    )
    q_r = tl.load(
        q + token * q_stride + (N + r)[None, :],
        mask=(i < queries)[:, None] & (r < R)[None, :],
        other=0.0,
    )
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    top, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    k_nope += k_first * kn_stride + head * kn_head
    k_rope += k_first * kr_stride + head * kr_head
    v += k_first * v_stride + head * v_head
    if CAUSAL:
        seen = keys - queries + block * BLOCK_Q + 1  # keys that the block's first query sees
        last = keys - queries + i
        high = tl.minimum(keys, keys - queries + (block + 1) * BLOCK_Q)
    else:
        seen, last, high = keys, tl.zeros_like(i) + keys - 1, keys
    whole = tl.maximum(tl.minimum(seen, keys), 0) // BLOCK_K * BLOCK_K
    acc, top, total = _tiles(
        acc,
        top,
        total,
        q_n,
        q_r,
        k_nope,
        k_rope,
        v,
        0,
        whole,
        keys,
        last,
        scale,
        kn_stride,
        kr_stride,
        v_stride,
        N,
        R,
        V,
        BLOCK_N,
        BLOCK_R,
        BLOCK_V,
        BLOCK_K,
        STAGES,
        False,
        PRECISION,
    )
    acc, top, total = _tiles(
        acc,
        top,
        total,
        q_n,
        q_r,
        k_nope,
        k_rope,
        v,
        whole,
        high,
        keys,
        last,
        scale,
        kn_stride,
        kr_stride,
        v_stride,
        N,
        R,
        V,
        BLOCK_N,
        BLOCK_R,
        BLOCK_V,
        BLOCK_K,
        STAGES,
        True,
        PRECISION,
    )
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    line = (q_first + i) * heads + head
    tl.store(
        out + line[:, None] * V + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=(i < queries)[:, None] & (d < V)[None, :],
    )
    tl.store(lse + line, (top + tl.log2(total)) * 0.6931471805599453, mask=i < queries)


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    max_q: int,
    scale: float,
    causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the queries of each row to its own keys.

    With ``causal`` the last query of a row sees all its keys, and each earlier query one key fewer.
    Any strides are allowed except in the last dimension.

    Args:
        q: [n, H, N + R]
        k_nope: [m, H, N]
        k_rope: [m, R] or [m, H, R]
        v: [m, H, V]
        q_starts: int32 [B + 1] on the device; row b has queries q_starts[b] to q_starts[b + 1]
        k_starts: int32 [B + 1] on the device; the same for keys
        max_q: most queries of a row
        scale: factor on the scores
        causal: mask later keys
        out: contiguous [n, H, V] to write; None: a new tensor

    Returns:
        ``out`` [n, H, V] and lse float32 [n, H], the natural logarithm of each query's summed
            exponentials. Where a query sees no key, lse is -inf and ``out`` is zero.
    """
    (tokens, heads, _) = q.shape
    nope = k_nope.shape[2]
    rope = k_rope.shape[-1]
    size = v.shape[2]
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if not tokens:
        return out, lse
    assert out.is_contiguous() and all(x.stride(-1) == 1 for x in (q, k_nope, k_rope, v))
    block_q, block_k, warps, stages = _tile(max_q, q.element_size())
    mla_prefill_kernel[(cdiv(max_q, block_q), heads, q_starts.shape[0] - 1)](
        q,
        k_nope,
        k_rope,
        v,
        out,
        lse,
        q_starts,
        k_starts,
        scale * LOG2_E,
        heads,
        q.stride(0),
        q.stride(1),
        k_nope.stride(0),
        k_nope.stride(1),
        k_rope.stride(0),
        k_rope.stride(1) if k_rope.dim() == 3 else 0,
        v.stride(0),
        v.stride(1),
        N=nope,
        R=rope,
        V=size,
        BLOCK_N=_padded(nope),
        BLOCK_R=_padded(rope),
        BLOCK_V=_padded(size),
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        STAGES=stages,
        CAUSAL=causal,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    return out, lse


def _padded(size: int) -> int:
    """Return the number of columns of a tile that holds ``size`` columns."""
    return max(16, next_power_of_2(size))


def _tile(max_q: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return the numbers of queries, keys, warps and pipeline stages of a program.

    Args:
        max_q: most queries of a row
        itemsize: bytes of a number
    """
    if itemsize > 2:
        return 32, 16, 4, 2
    return (128, 64, 8, 3) if max_q > 64 else (64, 64, 4, 3)
