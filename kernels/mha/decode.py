"""Multi-head, grouped-query and multi-query attention over a paged cache for decoding.

Rows have few query tokens. The query heads of one key head, times the row's query tokens, fill a
tensor core tile, so that a key is loaded once for all of them. Split-KV: the keys of a row are
divided among ``splits`` programs whose partial results ``kernels.mla.merge_splits`` merges. The
grid depends only on the padded batch; lengths are read on the device (FlashDecoding, Dao 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla.merge_splits import merge
from glowplug.kernels.paged import page_table as paged


@triton.jit
def _tile(at, filled, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [N, D] at the pointers ``at`` [N]; rows that are not ``filled`` are zeros."""
    d = tl.arange(0, BLOCK_D)
    if D == BLOCK_D:
        return tl.load(at[:, None] + d[None, :], mask=filled[:, None], other=0.0)
    return tl.load(at[:, None] + d[None, :], mask=filled[:, None] & (d < D)[None, :], other=0.0)


# NOTE: rows may begin anywhere in the tensors of a batch; without do_not_specialize_on_alignment a
# variant for each alignment would be compiled while serving
@triton.jit(
    do_not_specialize=["splits", "first_key", "width", "span", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "tree_mask"],
)
def mha_decode_kernel(
    query,
    k_cache,
    v_cache,
    page_table,
    kv_lens,
    tree_mask,
    out,
    lse,
    scale,
    splits,
    first_key,
    width,
    span,
    kv_heads,
    table_stride,
    q_token,
    q_head,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    slot_stride: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend ``BLOCK_M`` pairs of a row and key head to one split of the row's keys.

    A pair is (query token, query head of the key head's group). Softmax is in base 2: ``scale``
    includes log2(e). NARROW: FP8 is widened to float16, which is one instruction and exact. ``out``
    is written at [token, head, D] if there is one split, else at [token, head, split, D] with
    ``lse`` (base 2) at [token, head, split].
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    head, block = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    row, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    each = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    start = split * each
    end = tl.minimum(start + each, length)
    if SPLIT:
        if start >= end:
            return
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = pair < width * GROUP
    own = pair // GROUP
    token, q_number = (row * width + own).to(tl.int64), head * GROUP + pair % GROUP
    q = _tile(query + token * q_token + q_number * q_head, real, D, BLOCK_D)
    if NARROW:
        q = q.to(tl.float16)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tree = tl.load(tree_mask + row * width + own, mask=real, other=1) if TREE else own
    begin = length - (span if TREE else width)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    table = page_table + row * table_stride
    for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        filled = (n0 + n >= first_key) & (n0 + n < end)
        at = paged.entries(head * D, table, n0, n, end, slot_stride, PAGE, BLOCK_N)
        key = _tile(k_cache + at, filled, D, BLOCK_D).to(q.dtype)
        value = _tile(v_cache + at, filled, D, BLOCK_D).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        seen = paged.visible(n0 + n, begin, own, tree, first_key, end, TREE)
        weights, kept, top, total = paged.weights(tl.where(seen, scores, float("-inf")), top, total)
        acc = tl.dot(weights.to(q.dtype), value, acc * kept, input_precision=PRECISION)
    norm = tl.sum(total, axis=1)
    inverse = (1.0 / tl.where(norm == 0.0, 1.0, norm))[:, None]
    line = (token * kv_heads * GROUP + q_number) * splits + split
    tl.store(
        out + line[:, None] * D + d[None, :],
        (acc * inverse).to(out.dtype.element_ty),
        mask=real[:, None] & (d < D)[None, :],
    )
    if SPLIT:
        tl.store(lse + line, top + tl.log2(norm), mask=real)


@dataclass(frozen=True)
class MhaTiling:
    """Launch configuration of a decode step: kernel constants that a captured graph fixes.

    Attributes:
        block_m: pairs of a query token and a query head per program
        block_n: keys per tile
        splits: KV splits per row
        warps: warps per program
        stages: pipeline stages
    """

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def mha_tiling(
    rows: int, width: int, heads: int, kv_heads: int, dim: int, context: int, dtype: torch.dtype
) -> MhaTiling:
    """Choose the tiling of a decode step for an H200.

    Args:
        rows: decode rows of the step, padding included
        width: query tokens per row
        heads: query heads
        kv_heads: key heads
        dim: numbers of a head
        context: upper bound of the rows' lengths
        dtype: dtype of the queries
    """
    pairs = width * (heads // kv_heads)
    block_m = min(64 if dtype.itemsize <= 2 else 32, max(16, next_power_of_2(pairs)))
    block_n = 64 if dtype.itemsize <= 2 else 16
    blocks = max(1, rows * kv_heads * cdiv(pairs, block_m))
    splits = paged.best_splits(blocks, cdiv(context, block_n), MULTIPROCESSORS)
    return MhaTiling(
        block_m, block_n, splits, 4, 3 if dtype.itemsize > 2 else 7 if dim <= 128 else 5
    )


def mha_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    tiling: MhaTiling,
    first_key: int = 0,
    tree: Tensor | None = None,
    tree_span: int = 0,
) -> Tensor:
    """Attend queries to a paged cache. An FP8 cache is read as stored, without a scale.

    Query token i (0 to W - 1) of a row with L keys sees those at positions ``first_key`` to
    L - W + i, both included. With ``tree`` it sees all keys before the row's last S, and of these
    S keys it sees key j if bit j of ``tree[row, i]`` is set.

    Args:
        query: [B * W, H, D]; W is the number of tokens divided by B
        k_cache: [slots, K, D]
        v_cache: [slots, K, D]
        page_table: int32 [B, P] on the device
        kv_lens: int32 [B] on the device
        scale: factor on the scores
        page_size: slots per page
        tiling: tiling of the step
        first_key: position of the first visible key
        tree: int64 [B, W] or None
        tree_span: S, at most 64; 0: W

    Returns:
        [B * W, H, D]
    """
    (tokens, heads, dim) = query.shape
    (rows,) = kv_lens.shape
    kv_heads = k_cache.shape[1]
    out = query.new_empty(tokens, heads, dim)
    if not tokens:
        return out
    assert query.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    width, group = tokens // rows, heads // kv_heads
    splits = tiling.splits
    partial = out
    lse = kv_lens
    if splits > 1:
        partial = query.new_empty(tokens, heads, splits, dim)
        lse = query.new_empty(tokens, heads, splits, dtype=torch.float32)
    mask, span = paged.tree_arguments(tree, tree_span, kv_lens, width)
    mha_decode_kernel[(kv_heads * cdiv(width * group, tiling.block_m), rows, splits)](
        query,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        mask,
        partial,
        lse,
        scale * paged.LOG2_E,
        splits,
        first_key,
        width,
        span,
        kv_heads,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        D=dim,
        GROUP=group,
        slot_stride=kv_heads * dim,
        BLOCK_D=max(16, next_power_of_2(dim)),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        PAGE=page_size,
        SPLIT=splits > 1,
        STAGES=tiling.stages,
        TREE=tree is not None,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        NARROW=k_cache.dtype.itemsize == 1 and query.dtype.itemsize == 2,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **dependent_launch.options(),
    )
    if splits > 1:
        merge(partial, lse, kv_lens, out, width * heads, tiling.block_n)
    return out
