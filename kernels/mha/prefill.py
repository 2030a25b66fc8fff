"""Ragged attention over a paged cache, for prompt chunks whose keys are already in the cache.

The chunks may have a cached prefix. The loop is FlashAttention-2's (Dao, 2023): a block of queries
of one row against the keys of the row tile by tile; tiles that every query of the block sees in
full need no mask. The grid depends only on the numbers of tokens and rows: a program finds its row
on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.paged import page_table as paged

ROWS_PER_VARIANT_MIN = 128  #: up to this many rows share one compiled variant


@triton.jit
def _block(q_starts, rows, number, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the row of query block ``number`` and the index of the block in the row.

    The row is ``rows`` if there is no such block.
    """
    r = tl.arange(0, BLOCK_R)
    first = tl.load(q_starts + r, mask=r < rows, other=0)
    blocks = tl.cdiv(tl.load(q_starts + r + 1, mask=r < rows, other=0) - first, BLOCK_Q)
    before = (tl.cumsum(blocks, axis=0) <= number) & (r < rows)
    return tl.sum(before.to(tl.int32), axis=0), number - tl.sum(tl.where(before, blocks, 0), axis=0)


@triton.jit
def _tile(at, filled, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Load rows [N, D] at pointers ``at`` [N]; with MASKED, rows not ``filled`` are zeros."""
    d = tl.arange(0, BLOCK_D)
    if MASKED or D != BLOCK_D:
        return tl.load(at[:, None] + d[None, :], mask=filled[:, None] & (d < D)[None, :], other=0.0)
    return tl.load(at[:, None] + d[None, :])


@triton.jit
def _tiles(
    acc,
    top,
    total,
    q,
    k_cache,
    v_cache,
    table,
    low,
    high,
    end,
    last,
    scale,
    base,
    slot_stride: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continue the attention of a block of queries with the keys at ``low`` to ``high``.

    The keys are read in tiles of ``BLOCK_K``. Query i sees the keys up to position ``last[i]``.
    """
    j = tl.arange(0, BLOCK_K)
    # NOTE: tiles begin at FIRST_KEY; if that is not 0, a tile may cross a page boundary
    STEP: tl.constexpr = BLOCK_K if FIRST_KEY == 0 else PAGE + 1
    for first in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        at = paged.entries(base, table, first, j, end, slot_stride, PAGE, STEP)
        filled = first + j < end
        key = _tile(k_cache + at, filled, D, BLOCK_D, MASKED).to(q.dtype)
        value = _tile(v_cache + at, filled, D, BLOCK_D, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            scores = tl.where((first + j)[None, :] <= last[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores * scale - shift[:, None])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), value, acc * kept[:, None], input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit(
    do_not_specialize=["rows", "skip", "heads", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "q_starts"],
)
def mha_prefill_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    kv_lens,
    q_starts,
    out,
    scale,
    rows,
    skip,
    heads,
    table_stride,
    q_token,
    q_head,
    slot_stride: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Attend ``BLOCK_Q`` queries of one row and head to the keys of the row.

    ``scale`` includes log2(e).
    """
    head, number = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row, block = _block(q_starts, rows, number, BLOCK_Q, BLOCK_R)
    if row >= rows:
        return
    begin = tl.load(q_starts + row)
    queries, end = tl.load(q_starts + row + 1) - begin, tl.load(kv_lens + row)
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real, token = i < queries, (begin - skip + i).to(tl.int64)
    query = _tile(q + token * q_token + head * q_head, real, D, BLOCK_D, True)
    if NARROW:
        query = query.to(tl.float16)  # as in ``mha_decode_kernel``
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    last = end - queries + i
    seen = tl.minimum(
        end - queries + block * BLOCK_Q + 1, end
    )  # keys that the block's first query sees
    high = tl.minimum(end, end - queries + (block + 1) * BLOCK_Q)
    whole = FIRST_KEY + tl.maximum(seen - FIRST_KEY, 0) // BLOCK_K * BLOCK_K
    base, table = head // GROUP * D, page_table + row * table_stride
    acc, top, total = _tiles(
        acc,
        top,
        total,
        query,
        k_cache,
        v_cache,
        table,
        FIRST_KEY,
        whole,
        end,
        last,
        scale,
        base,
        slot_stride,
        FIRST_KEY,
        D,
        BLOCK_D,
        BLOCK_K,
        PAGE,
        STAGES,
        False,
        PRECISION,
    )
    acc, top, total = _tiles(
        acc,
        top,
        total,
        query,
        k_cache,
        v_cache,
        table,
        whole,
        high,
        end,
        last,
        scale,
        base,
        slot_stride,
        FIRST_KEY,
        D,
        BLOCK_D,
        BLOCK_K,
        PAGE,
        STAGES,
        True,
        PRECISION,
    )
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    d = tl.arange(0, BLOCK_D)
    tl.store(
        out + ((token * heads + head) * D)[:, None] + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None] & (d < D)[None, :],
    )


def mha_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor,
    scale: float,
    page_size: int,
    first_key: int = 0,
    skip: int = 0,
) -> Tensor:
    """Attend the queries of each row to its keys in the paged cache.

    The last query of a row sees all its keys, and each earlier query one key fewer. An FP8 cache is
    read as stored, without a scale.

    Args:
        q: [T, H, D]
        k_cache: [slots, K, D]
        v_cache: [slots, K, D]
        page_table: int32 [B, P] on the device, the pages of each row
        kv_lens: int32 [B] on the device; the keys of row b are at positions ``first_key`` to
            kv_lens[b]
        q_starts: int32 [B + 1] on the device; row b has the queries q_starts[b] - skip to
            q_starts[b + 1] - skip
        scale: factor on the scores
        page_size: slots per page
        first_key: position of the first visible key
        skip: subtracted from ``q_starts``

    Returns:
        [T, H, D]
    """
    (tokens, heads, dim) = q.shape
    kv_heads = k_cache.shape[1]
    rows = kv_lens.shape[0]
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    assert q.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    block_q, block_k, warps, stages = _sizes(dim, q.element_size())
    mha_prefill_kernel[(heads, tokens // block_q + rows)](
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        q_starts,
        out,
        scale * paged.LOG2_E,
        rows,
        skip,
        heads,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        slot_stride=kv_heads * dim,
        GROUP=heads // kv_heads,
        FIRST_KEY=first_key,
        D=dim,
        BLOCK_D=max(16, next_power_of_2(dim)),
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_R=max(ROWS_PER_VARIANT_MIN, next_power_of_2(rows)),
        PAGE=page_size,
        STAGES=stages,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        NARROW=k_cache.dtype.itemsize == 1 and q.dtype.itemsize == 2,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _sizes(dim: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return the numbers of queries, keys, warps and pipeline stages of a program.

    Args:
        dim: numbers of a head
        itemsize: bytes of a number
    """
    if itemsize > 2:
        return 32, 16, 4, 2
    return 64, 64, 4, 5 if dim <= 128 else 2
