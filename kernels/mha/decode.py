"""Multi-head, grouped-query and multi-query attention over a paged cache, few query tokens a row.

The query heads of one key head, times the row's query tokens, fill a block of the tensor cores, so
that a key is loaded once for all of them. The keys of a row are divided among ``splits`` programs
whose partial results ``mla_merge`` joins; the grid depends on the padded batch only, lengths are
read on the device (FlashDecoding, Dao 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla.merge_splits import merge
from glowplug.kernels.paged import page_table as paged


@triton.jit
def _tile(at, filled, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of D numbers at ``at`` [N], zeros where there are none."""
    d = tl.arange(0, BLOCK_D)
    if D == BLOCK_D:
        return tl.load(at[:, None] + d[None, :], mask=filled[:, None], other=0.0)
    return tl.load(at[:, None] + d[None, :], mask=filled[:, None] & (d < D)[None, :], other=0.0)


# NOTE: rows may begin anywhere in a batch's tensors, and a variant for each alignment would be
# compiled while serving
@triton.jit(
    do_not_specialize=["splits", "first_key", "width", "table_stride"],
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
    """A program: ``BLOCK_M`` (query token, head of the group) pairs of a row and key head, one
    split of its keys.

    Softmax in base 2: ``scale`` carries log2(e). NARROW: FP8 is widened to float16, which is one
    instruction and exact. Writes ``out`` at [token, head, D] if there is one split, else at
    [token, head, split, D], and ``lse`` (base 2) at [token, head, split].
    """
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
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
        seen = paged.visible(n0 + n, length - width, own, tree, first_key, end, TREE)
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
class Tiling:
    """How a decode step is cut: constants of the kernel, fixed by what a captured graph fixes."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def tiling(
    rows: int, width: int, heads: int, kv_heads: int, dim: int, context: int, dtype: torch.dtype
) -> Tiling:
    """For ``rows`` (padded) rows of ``width`` query tokens and of ``context`` keys at most."""
    pairs = width * (heads // kv_heads)
    block_m = min(64 if dtype.itemsize <= 2 else 32, max(16, next_power_of_2(pairs)))
    block_n = 64 if dtype.itemsize <= 2 else 16
    blocks = max(1, rows * kv_heads * cdiv(pairs, block_m))
    splits = paged.best_splits(blocks, cdiv(context, block_n), MULTIPROCESSORS)
    return Tiling(block_m, block_n, splits, 4, 3 if dtype.itemsize > 2 else 7 if dim <= 128 else 5)


def mha_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    cut: Tiling,
    first_key: int = 0,
    tree: Tensor | None = None,
) -> Tensor:
    """query [B * W, H, D] over caches [slots, K, D] -> [B * W, H, D]; a cache in FP8 is read as it
    is.

    page_table int32 [B, P], kv_lens int32 [B] on the device; W is what B leaves of the tokens.
    Query token i of a row sees the keys from ``first_key`` to the row's last but W - 1 - i, or with
    ``tree`` int64 [B, W] those before the row's W own tokens, and own token j where bit j is set.
    """
    (tokens, heads, dim) = query.shape
    (rows,) = kv_lens.shape
    kv_heads = k_cache.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    if not tokens:
        return out
    assert query.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    group = heads // kv_heads
    splits = cut.splits
    partial = out
    lse = kv_lens
    if splits > 1:
        partial = query.new_empty(tokens, heads, splits, dim)
        lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=query.device)
    mha_decode_kernel[(kv_heads * cdiv(tokens // rows * group, cut.block_m), rows, splits)](
        query,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        tree if tree is not None else kv_lens,
        partial,
        lse,
        scale * paged.LOG2_E,
        splits,
        first_key,
        tokens // rows,
        kv_heads,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        D=dim,
        GROUP=group,
        slot_stride=kv_heads * dim,
        BLOCK_D=max(16, next_power_of_2(dim)),
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        PAGE=page_size,
        SPLIT=splits > 1,
        STAGES=cut.stages,
        TREE=tree is not None,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        NARROW=k_cache.dtype.itemsize == 1 and query.dtype.itemsize == 2,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **dependent.options(),
    )
    if splits > 1:
        merge(partial, lse, kv_lens, out, tokens // rows * heads, cut.block_n)
    return out
