"""Latent attention over a paged cache for the decode, verify and draft steps of MLA.

Rows have few query tokens. One key head of C + R numbers serves every query head, and its first C
numbers are also the value, so a tile of the cache is loaded once and multiplied twice. The query
heads of a row, times its query tokens, fill a tensor core tile.

Split-KV: the keys of a row are divided among ``splits`` programs. Their partial results are merged
by ``merge_splits``, by the last program of a row, or by W_UV's GEMM (``value_projection``). The
grid depends only on the padded batch; lengths are read on the device (FlashDecoding, Dao 2023;
FlashMLA, DeepSeek-AI 2025).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla.decode_tiling import LAST_PROGRAM_SPLITS_MAX, MlaTiling
from glowplug.kernels.mla.merge_splits import merge
from glowplug.kernels.paged import page_table as paged

TICKETS = 1 << 16  #: arrival counters per device


@triton.jit
def _load_columns(at, filled, C: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """Load columns FIRST to FIRST + SIZE of the rows of C numbers at ``at``.

    Elements that are not ``filled`` or beyond C are zeros.
    """
    c = FIRST + tl.arange(0, SIZE)
    if C >= FIRST + SIZE:
        return tl.load(at[:, None] + c[None, :], mask=filled[:, None], other=0.0)
    return tl.load(at[:, None] + c[None, :], mask=filled[:, None] & (c[None, :] < C), other=0.0)


@triton.jit(do_not_specialize=["splits", "first_key", "width", "span", "table_stride"])
def mla_decode_kernel(
    query,
    kv,
    page_table,
    kv_lens,
    tree_mask,
    out,
    lse,
    scale,
    kv_scale,
    splits,
    first_key,
    width,
    span,
    heads,
    table_stride,
    kv_stride: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LATENT_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend ``BLOCK_M`` (query token, head) pairs of a row to one split of its keys.

    Softmax is in base 2: ``scale`` includes log2(e) and the scale of the cache. ``out`` is written
    at [pair, C] if there is one split, else at [pair, split, C] with ``lse`` (base 2) at [pair,
    split]. The latent is divided into ``LATENT_TILES`` tiles of ``BLOCK_C`` columns: short matrix
    multiplications that do not wait for each other.
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
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
    q_at = query + at * (C + R)
    q_r = _load_columns(q_at + C, real, R, BLOCK_R, 0)
    q_c, acc = (), ()
    for tile in tl.static_range(LATENT_TILES):
        q_c = q_c + (_load_columns(q_at, real, C, BLOCK_C, tile * BLOCK_C),)  # type: ignore[assignment]
        acc = acc + (tl.zeros([BLOCK_M, BLOCK_C], tl.float32),)  # type: ignore[assignment]
    tree = tl.load(tree_mask + row * width + own, mask=real, other=1) if TREE else own
    begin = length - (span if TREE else width)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        filled = (n0 + n >= first_key) & (n0 + n < end)
        entry = paged.entries(
            kv, page_table + row * table_stride, n0, n, end, kv_stride, PAGE, BLOCK_N
        )
        latent = ()
        for tile in tl.static_range(LATENT_TILES):
            latent = latent + (
                _load_columns(entry, filled, C, BLOCK_C, tile * BLOCK_C).to(q_r.dtype),
            )  # type: ignore[assignment]
        rope = _load_columns(entry + C, filled, R, BLOCK_R, 0).to(q_r.dtype)
        # NOTE: each term is scaled before the sum: a plain sum of matrix multiplications becomes
        # one chain, in which each link waits for the one before
        scores = tl.dot(q_r, tl.trans(rope), input_precision=PRECISION) * scale
        for tile in tl.static_range(LATENT_TILES):
            scores += tl.dot(q_c[tile], tl.trans(latent[tile]), input_precision=PRECISION) * scale
        seen = paged.visible(n0 + n, begin, own, tree, first_key, end, TREE)
        weights, kept, top, total = paged.weights(tl.where(seen, scores, float("-inf")), top, total)
        summed = ()
        for tile in tl.static_range(LATENT_TILES):
            summed = summed + (  # type: ignore[assignment]
                tl.dot(
                    weights.to(q_r.dtype), latent[tile], acc[tile] * kept, input_precision=PRECISION
                ),
            )
        acc = summed
    norm = tl.sum(total, axis=1)
    inverse = (kv_scale / tl.where(norm == 0.0, 1.0, norm))[:, None]
    line = at * splits + split
    for tile in tl.static_range(LATENT_TILES):
        c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        tl.store(
            out + line[:, None] * C + c[None, :],
            (acc[tile] * inverse).to(out.dtype.element_ty),
            mask=real[:, None] & (c < C)[None, :],
        )
    if SPLIT:
        tl.store(lse + line, top + tl.log2(norm), mask=real)


@cache
def _tickets(device: torch.device) -> Tensor:
    """Return a device's counters of finished programs, for the merge of splits on Hopper.

    NOTE: all streams of a device share the counters, so two steps must not decode on it at once.
    The counters are created before any capture.
    """
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def mla_decode(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    lora: int,
    tiling: MlaTiling,
    first_key: int = 0,
    tree: Tensor | None = None,
    tree_span: int = 0,
    kv_scale: float = 1.0,
) -> Tensor:
    """Attend absorbed queries to a paged cache.

    Query token i (0 to W - 1) of a row with L keys sees those at positions ``first_key`` to
    L - W + i, both included. With ``tree`` it sees all keys before the row's last S, and of these
    S keys it sees key j if bit j of ``tree[row, i]`` is set.

    Args:
        query: [B * W, H, C + R]; W is the number of tokens divided by B
        kv: the cache [slots, C + R]
        page_table: int32 [B, P] on the device
        kv_lens: int32 [B] on the device
        scale: factor on the scores
        page_size: slots per page
        lora: C
        tiling: tiling of the step, from ``decode_tiling.mla_tiling``
        first_key: position of the first visible key
        tree: int64 [B, W] or None
        tree_span: S, at most 64; 0: W
        kv_scale: factor on the contents of an FP8 cache

    Returns:
        [B * W, H, C] in the query's dtype
    """
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, lora)
    if not tokens:
        return out
    if tiling.splits == 1:
        _launch(
            query,
            kv,
            page_table,
            kv_lens,
            scale,
            page_size,
            tiling,
            first_key,
            tree,
            tree_span,
            kv_scale,
            out,
            kv_lens,
            None,
        )
        return out
    merge_here = (
        tiling.pipeline
        and tiling.block_m != 32
        and tiling.splits <= LAST_PROGRAM_SPLITS_MAX
        and tokens * heads <= TICKETS
    )
    partial, lse = decode_splits(
        query,
        kv,
        page_table,
        kv_lens,
        scale,
        page_size,
        lora,
        tiling,
        first_key,
        tree,
        tree_span,
        kv_scale,
        out if merge_here else None,
    )
    if not merge_here:
        merge(partial, lse, kv_lens, out, tokens // len(kv_lens) * heads, tiling.block_n)
    return out


def decode_splits(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    lora: int,
    tiling: MlaTiling,
    first_key: int = 0,
    tree: Tensor | None = None,
    tree_span: int = 0,
    kv_scale: float = 1.0,
    merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention separately for each of S splits of the keys: ``tiling.splits``, > 1.

    A row with fewer than S tiles of ``tiling.block_n`` keys leaves some of its splits unwritten.
    Other arguments as in :func:`mla_decode`.

    Args:
        merged: [B * W, H, C], receives the merged result from the Hopper kernel; None: not merged

    Returns:
        partial results [B * W, H, S, C] in the query's dtype, and the log-sum-exps of the scores,
            float32 [B * W, H, S] in base 2
    """
    tokens, heads, _ = query.shape
    partial = query.new_empty(tokens, heads, tiling.splits, lora)
    lse = torch.empty((tokens, heads, tiling.splits), dtype=torch.float32, device=query.device)
    if tokens:
        _launch(
            query,
            kv,
            page_table,
            kv_lens,
            scale,
            page_size,
            tiling,
            first_key,
            tree,
            tree_span,
            kv_scale,
            partial,
            lse,
            merged,
        )
    return partial, lse


def _launch(
    query: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    page_size: int,
    tiling: MlaTiling,
    first_key: int,
    tree: Tensor | None,
    tree_span: int,
    kv_scale: float,
    out: Tensor,
    lse: Tensor,
    merged: Tensor | None,
) -> None:
    """Launch the kernel that ``tiling`` selects.

    ``out`` and ``lse`` receive the partial results; with one split ``out`` receives the result.
    Other arguments as in :func:`mla_decode` and :func:`decode_splits`.
    """
    (tokens, heads, size) = query.shape
    rows = kv_lens.shape[0]
    lora = out.shape[-1]
    assert query.is_contiguous() and kv.stride(1) == 1
    pairs = tokens // rows * heads
    splits = tiling.splits
    grid = (cdiv(pairs, tiling.block_m), rows, splits)
    mask, span = paged.tree_arguments(tree, tree_span, kv_lens, tokens // rows)
    rows_of = (page_table, kv_lens, mask, out, lse)
    rest = (
        scale * kv_scale * paged.LOG2_E,
        kv_scale,
        splits,
        first_key,
        tokens // rows,
        span,
        heads,
        page_table.stride(0),
    )
    same = _constants(tiling, lora, size - lora, page_size, tree is not None)
    if tiling.pipeline:
        from glowplug.kernels.mla import decode_hopper

        descriptors = decode_hopper.tma_descriptors(kv, lora)
        decode_hopper.mla_decode_hopper_kernel[grid](
            query,
            *descriptors,
            *rows_of,
            out if merged is None else merged,
            _tickets(query.device),
            *rest,
            STAGES=tiling.stages,
            MERGED_SPLITS=0 if merged is None else splits,
            FLAT=tiling.merge_in_values,
            **same,
        )
        return
    mla_decode_kernel[grid](
        query,
        kv,
        *rows_of,
        *rest,
        kv_stride=kv.stride(0),
        BLOCK_C=max(16, next_power_of_2(cdiv(lora, tiling.latent_tiles))),
        BLOCK_R=max(16, next_power_of_2(size - lora)),
        LATENT_TILES=tiling.latent_tiles,
        BLOCK_N=tiling.block_n,
        STAGES=tiling.stages,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        num_stages=tiling.stages,
        **same,
    )


def _constants(
    tiling: MlaTiling, lora: int, rope: int, page_size: int, tree: bool
) -> dict[str, Any]:
    """Return the constants and options that both kernels have."""
    return {
        "C": lora,
        "R": rope,
        "BLOCK_M": tiling.block_m,
        "PAGE": page_size,
        "SPLIT": tiling.splits > 1,
        "TREE": tree,
        "num_warps": tiling.warps,
        **dependent_launch.options(),
    }
