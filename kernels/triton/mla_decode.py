"""Latent attention over a paged cache, few query tokens a row: decode, verify and draft steps of MLA.

One key head of C + R numbers serves every query head and its first C numbers are the value too, so a tile of the cache is
loaded once and multiplied twice, and the query heads of a row (times its query tokens) fill a block of the tensor cores.
The cache of a row is divided among ``splits`` programs whose partial results ``mla_merge`` joins; the grid depends on the
padded batch only, lengths are read on the device (FlashDecoding; FlashMLA's tiling is DeepSeek-AI, 2025).
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton.mla_merge import mla_merge_kernel

PROGRAMS = 264  #: that keep an H200 busy: two for each of its 132 multiprocessors
LOG2_E = 1.4426950408889634


@triton.jit
def _visible(pos, own, length, end, width, first_key, tree, AXIS: tl.constexpr, TREE: tl.constexpr):
    """Which keys at ``pos`` [N] the query tokens ``own`` [M] see; keys lie along ``AXIS``."""
    key = tl.expand_dims(pos, 1 - AXIS)
    begin = length - width  # of the row's own tokens
    if TREE:
        mine = key - begin
        seen = (mine < 0) | ((tl.expand_dims(tree, AXIS) >> tl.maximum(mine, 0).to(tl.int64)) & 1 != 0)
    else:
        seen = key <= begin + tl.expand_dims(own, AXIS)
    return seen & (key >= first_key) & (key < end)


@triton.jit(do_not_specialize=["splits", "first_key", "width", "table_stride"])
def mla_decode_kernel(query, kv, page_table, kv_lens, tree_mask, out, lse, scale, kv_scale, splits, first_key, width,
                      heads, table_stride, kv_stride: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
                      BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      PAGE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr,
                      TREE: tl.constexpr, PRECISION: tl.constexpr):
    """A program: ``BLOCK_M`` (query token, head) pairs of a row, one split of its keys.

    Softmax in base 2: ``scale`` carries log2(e) and the cache's scale. Writes ``out`` at [pair, C] if there is one split,
    else float32 at [pair, split, C], and ``lse`` (base 2) at [pair, split]. Keys lie in rows of the score tile (``AXIS``
    0: long tiles of keys against few queries) or in its columns (``AXIS`` 1).
    """
    block, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    each = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    start = split * each
    end = tl.minimum(start + each, length)
    if SPLIT:
        if start >= end:
            return
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = pair < width * heads
    own = pair // heads
    at = (row * width * heads + pair).to(tl.int64)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    q_c = tl.load(query + at[:, None] * (C + R) + c[None, :], mask=real[:, None] & (c[None, :] < C), other=0.0)
    q_r = tl.load(query + at[:, None] * (C + R) + (C + r)[None, :], mask=real[:, None] & (r[None, :] < R), other=0.0)
    tree = tl.load(tree_mask + row * width + own, mask=real, other=1) if TREE else own
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_C, BLOCK_M] if AXIS == 0 else [BLOCK_M, BLOCK_C], tl.float32)
    table = page_table + row * table_stride
    n = tl.arange(0, BLOCK_N)
    for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        pos = n0 + n
        filled = (pos >= first_key) & (pos < end)
        if PAGE % BLOCK_N == 0:
            slot = (tl.load(table + n0 // PAGE) * PAGE + n0 % PAGE).to(tl.int64)
            entry = kv + slot * kv_stride + n * kv_stride
        else:
            page = tl.load(table + pos // PAGE, mask=pos < end, other=0)
            entry = kv + (page * PAGE + pos % PAGE).to(tl.int64) * kv_stride
        if C == BLOCK_C:
            latent = tl.load(entry[:, None] + c[None, :], mask=filled[:, None], other=0.0)
        else:
            latent = tl.load(entry[:, None] + c[None, :], mask=filled[:, None] & (c[None, :] < C), other=0.0)
        if R == BLOCK_R:
            rope = tl.load(entry[:, None] + (C + r)[None, :], mask=filled[:, None], other=0.0)
        else:
            rope = tl.load(entry[:, None] + (C + r)[None, :], mask=filled[:, None] & (r[None, :] < R), other=0.0)
        latent, rope = latent.to(q_c.dtype), rope.to(q_c.dtype)
        if AXIS == 0:
            scores = tl.dot(latent, tl.trans(q_c), input_precision=PRECISION)
            scores = tl.dot(rope, tl.trans(q_r), scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q_c, tl.trans(latent), input_precision=PRECISION)
            scores = tl.dot(q_r, tl.trans(rope), scores, input_precision=PRECISION)
        seen = _visible(pos, own, length, end, width, first_key, tree, AXIS, TREE)
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=AXIS))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - tl.expand_dims(base, AXIS))
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, axis=AXIS)
        acc = acc * tl.expand_dims(kept, AXIS)
        if AXIS == 0:
            acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
        top = higher
    acc = acc * tl.expand_dims(kv_scale / tl.where(total == 0.0, 1.0, total), AXIS)
    line = at * splits + split
    target = out + tl.expand_dims(line * C, AXIS) + tl.expand_dims(c, 1 - AXIS)
    tl.store(target, acc.to(out.dtype.element_ty), mask=tl.expand_dims(real, AXIS) & (tl.expand_dims(c, 1 - AXIS) < C))
    if SPLIT:
        tl.store(lse + line, top + tl.log2(total), mask=real)


@dataclass(frozen=True)
class Tiling:
    """How a decode step is cut: constants of the two kernels, fixed by what a captured graph fixes."""

    block_m: int
    block_n: int
    splits: int
    axis: int
    warps: int
    stages: int


def tiling(rows: int, width: int, heads: int, context: int, itemsize: int = 2) -> Tiling:
    """For ``rows`` (padded) rows of ``width`` query tokens, ``heads`` heads, rows of ``context`` keys at most."""
    block_m = min(64, max(16, triton.next_power_of_2(width * heads)))
    block_n = 32 if itemsize <= 2 else 16
    blocks = rows * triton.cdiv(width * heads, block_m)
    splits = max(1, min(triton.cdiv(PROGRAMS, max(1, blocks)), triton.cdiv(context, block_n)))
    return Tiling(block_m, block_n, splits, 1, 4, 3)


def mla_decode(query: Tensor, kv: Tensor, page_table: Tensor, kv_lens: Tensor, scale: float, page_size: int, lora: int,
               cut: Tiling, first_key: int = 0, tree: Tensor | None = None, kv_scale: float = 1.0) -> Tensor:
    """Absorbed queries [B * W, H, C + R] over the cache kv [slots, C + R] -> [B * W, H, C] in the query's dtype.

    page_table int32 [B, P], kv_lens int32 [B] on the device; W is what B leaves of the tokens. Query token i of a row
    sees the keys from ``first_key`` to the row's last but W - 1 - i, or with ``tree`` int64 [B, W] those before the row's
    W own tokens, and own token j where bit j is set. ``kv_scale``: what numbers of an FP8 cache are multiplied by.
    """
    tokens, heads, size = query.shape
    rows = kv_lens.shape[0]
    out = query.new_empty(tokens, heads, lora)
    if not tokens:
        return out
    width, splits = tokens // rows, cut.splits
    assert query.is_contiguous() and kv.stride(1) == 1
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((tokens, heads, splits, lora), dtype=torch.float32, device=out.device)
        lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=out.device)
    block_c = max(16, triton.next_power_of_2(lora))
    mla_decode_kernel[(triton.cdiv(width * heads, cut.block_m), rows, splits)](
        query, kv, page_table, kv_lens, tree if tree is not None else kv_lens, partial, lse,
        scale * kv_scale * LOG2_E, kv_scale, splits, first_key, width, heads, page_table.stride(0), kv_stride=kv.stride(0),
        C=lora, R=size - lora, BLOCK_C=block_c, BLOCK_R=max(16, triton.next_power_of_2(size - lora)),
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, PAGE=page_size, SPLIT=splits > 1, STAGES=cut.stages, AXIS=cut.axis,
        TREE=tree is not None, PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        num_warps=cut.warps, num_stages=cut.stages)
    if splits > 1:
        block_d = min(block_c, 128)
        mla_merge_kernel[(tokens * heads, triton.cdiv(lora, block_d))](
            partial, lse, kv_lens, out, width * heads, splits, C=lora, BLOCK_D=block_d, BLOCK_N=cut.block_n,
            BLOCK_S=triton.next_power_of_2(splits), CHUNK=min(16, triton.next_power_of_2(splits)), num_warps=4)
    return out
