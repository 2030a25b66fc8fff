"""Merge of the KV splits of ``mla_decode`` and ``mha_decode``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["pairs", "splits"])
def mla_merge_kernel(
    partial,
    lse,
    kv_lens,
    out,
    pairs,
    splits,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge ``BLOCK_D`` columns of one (query token, head) pair.

    The ``pairs`` pairs of a row are contiguous. partial [pair, split, C] and lse float32 [pair,
    split] in base 2 -> out [pair, C]. The number of filled splits of a row follows from its length
    as in the preceding kernel; the first ``CHUNK`` splits are loaded before that number is known.
    """
    dependent_launch.begin(DEPENDENT)
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, i, d = tl.arange(0, BLOCK_S), tl.arange(0, CHUNK), part * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (d < C)[None, :]
    first = partial + (pair * splits + i)[:, None] * C + d[None, :]
    dependent_launch.wait(DEPENDENT)
    length = tl.load(kv_lens + pair // pairs)
    value = tl.load(first, mask=(i < splits)[:, None] & inside, other=0.0)
    state = tl.load(lse + pair * splits + i, mask=i < splits, other=0.0)
    tiles = tl.cdiv(length, BLOCK_N)
    count = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), 1))
    states = tl.load(lse + pair * splits + s, mask=s < count, other=float("-inf"))
    top = tl.max(states, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(states - top), axis=0)
    weight = tl.exp2(tl.where(i < count, state, float("-inf")) - top)
    acc = tl.where((i < count)[:, None], value.to(tl.float32), 0.0) * weight[:, None]
    for done in range(CHUNK, count, CHUNK):
        more = done + i < count
        weight = tl.exp2(
            tl.load(lse + pair * splits + done + i, mask=more, other=float("-inf")) - top
        )
        value = tl.load(first + done * C, mask=more[:, None] & inside, other=0.0)
        acc += value.to(tl.float32) * weight[:, None]
    result = tl.sum(acc, axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + pair * C + d, result.to(out.dtype.element_ty), mask=d < C)


def merge(
    partial: Tensor, lse: Tensor, kv_lens: Tensor, out: Tensor, pairs: int, block_n: int
) -> None:
    """Merge partial results of KV splits into ``out``.

    Args:
        partial: [B * W, H, S, C]
        lse: float32 [B * W, H, S], base 2
        kv_lens: int32 [B]
        out: [B * W, H, C], written
        pairs: W * H
        block_n: keys per tile of the preceding kernel
    """
    tokens, heads, splits, size = partial.shape
    padded = next_power_of_2(splits)
    block_d = min(128, next_power_of_2(size))
    mla_merge_kernel[(tokens * heads, cdiv(size, block_d))](
        partial,
        lse,
        kv_lens,
        out,
        pairs,
        splits,
        C=size,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        BLOCK_S=padded,
        CHUNK=min(16, padded),
        num_warps=4,
        **dependent_launch.options(),
    )
