"""Latent attention over a paged cache on Hopper, in Gluon.

It computes the same as ``mla_decode_kernel``, with explicit control over the copies and matrix
instructions of this architecture.

The tensor memory accelerator (TMA) refills a ring of tiles of 64 keys: each buffer is refilled as
soon as its tile has been used, so that memory never waits for arithmetic. Tiles of an FP8 cache are
widened into one more buffer before they are multiplied. Up to 32 (query token, head) pairs are the
columns of the score tile, whose rows are the keys: then the tensor cores work without padding. With
64 pairs two warp groups share the rows of pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.mla.decode_hopper_copies import (
    TILE,
    barrier,
    fence_stores,
    fetch_tile,
    load_queries,
    start_pipeline,
    take_tile,
)


@gluon.constexpr_function
def _score_layout(block_m, warps):
    """Return the layout of the scores.

    With few (query token, head) pairs the keys are rows, otherwise columns that two warp groups
    share.
    """
    if block_m < 64:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_m, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 64 // (warps // 4), 16])


@gluon.constexpr_function
def _sum_layout(block_m, columns, warps):
    """Return the register layout of the output sums [block_m, columns] (warp-group MMA)."""
    if block_m < 64:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_m, 16])
    return gl.NVMMADistributedLayout(
        [3, 0], [4, warps // 4], [16, min(256, columns // (warps // 4)), 16]
    )


@gluon.jit
def _scores(q_c, q_r, latent, rope, blank, SWAP: gl.constexpr):
    """Multiply queries by keys; with SWAP the keys are the rows of the result."""
    if SWAP:
        scores = warpgroup_mma(latent, q_c.permute((1, 0)), blank, use_acc=False)
        return warpgroup_mma(rope, q_r.permute((1, 0)), scores)
    else:
        scores = warpgroup_mma(q_c, latent.permute((1, 0)), blank, use_acc=False)
        return warpgroup_mma(q_r, rope.permute((1, 0)), scores)


@gluon.jit
def _visible(pos, begin, own, tree, first_key, end, AXIS: gl.constexpr, TREE: gl.constexpr):
    """Return the mask of keys at ``pos`` [N] that the query tokens ``own`` [M] see.

    The row's own tokens begin at ``begin``. With TREE bit j of ``tree`` int64 [M] names the key at
    ``begin + j``, and all keys before ``begin`` are seen.
    """
    key = gl.expand_dims(pos, 1 - AXIS)
    if TREE:
        bit = gl.minimum(gl.maximum(key - begin, 0), 63).to(gl.int64)
        seen = (key < begin) | ((gl.expand_dims(tree, AXIS) >> bit & 1) != 0)
    else:
        seen = key <= gl.expand_dims(begin + own, AXIS)
    return seen & (key >= first_key) & (key < end)


@gluon.jit
def _weights(scores, top, total, AXIS: gl.constexpr):
    """Continue the softmax over one more tile of keys.

    Returns:
        The weights of the tile's keys, the factor on the sums so far, the new maximum and total.
    """
    higher = gl.maximum(top, gl.max(scores, AXIS))
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores - gl.expand_dims(base, AXIS))
    kept = gl.exp2(top - base)
    return weights, kept, higher, total * gl.expand_dims(kept, AXIS) + weights


@gluon.jit
def _add(acc, kept, weights, p_smem, latent, AXIS: gl.constexpr):
    """Return acc * kept plus the values of the tile times their weights."""
    p_smem.store(weights.to(p_smem.dtype))
    acc = acc * gl.expand_dims(gl.convert_layout(kept, gl.SliceLayout(AXIS, acc.type.layout)), AXIS)
    fence_stores()
    if AXIS == 0:
        return warpgroup_mma(latent.permute((1, 0)), p_smem, acc)
    else:
        return warpgroup_mma(p_smem, latent, acc)


@gluon.jit
def _store(
    out, acc, norm, kv_scale, line, real, C: gl.constexpr, AXIS: gl.constexpr, FLAT: gl.constexpr
):
    """Store out[line] = acc / norm * kv_scale.

    FLAT (pairs are columns of ``acc``): store through shared memory, so that a thread writes 16
    contiguous bytes of a pair rather than two.
    """
    layout: gl.constexpr = acc.type.layout
    side: gl.constexpr = gl.SliceLayout(AXIS, layout)
    inverse = gl.convert_layout(kv_scale / gl.where(norm == 0.0, 1.0, norm), side)
    if FLAT:
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
        value = gl.permute((acc * gl.expand_dims(inverse, 0)).to(out.dtype.element_ty), (1, 0))
        here = gl.convert_layout(line, gl.SliceLayout(1, flat)) * C
        kept = gl.convert_layout(real.to(gl.int32), gl.SliceLayout(1, flat)) != 0
        c = gl.arange(0, C, gl.SliceLayout(0, flat))
        gl.store(
            out + here[:, None] + c[None, :],
            gl.convert_layout(value, flat),
            mask=kept[:, None] & (c >= 0)[None, :],
        )
        return
    at = gl.expand_dims(gl.convert_layout(line, side) * C, AXIS) + gl.expand_dims(
        gl.arange(0, C, gl.SliceLayout(1 - AXIS, layout)), 1 - AXIS
    )
    mask = gl.expand_dims(gl.convert_layout(real.to(gl.int32), side) != 0, AXIS) & (at >= 0)
    gl.store(out + at, (acc * gl.expand_dims(inverse, AXIS)).to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _last_of(tickets, programs):
    """Return whether this is the last of ``programs`` programs to count itself in ``tickets``.

    The last one resets the counter for the next step.
    """
    barrier()
    last = gl.atomic_add(tickets, 1, sem="acq_rel") == programs - 1
    if last:
        gl.store(tickets, 0)
    return last


@gluon.jit
def _merge_splits(
    partial,
    lse,
    out,
    line,
    first,
    pairs,
    count,
    SPLITS: gl.constexpr,
    C: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Merge the first ``count`` splits of BLOCK_M (query token, head) pairs from ``first`` on.

    If ``count`` is 0, the result is zeros. ``line`` is the index of the first pair of the row.
    """
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    pair = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, flat))
    real, c = pair < pairs, gl.arange(0, C, gl.SliceLayout(0, flat))
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, flat))
    for split in gl.static_range(SPLITS):
        top = gl.maximum(
            top,
            gl.load(
                lse + (line + pair) * SPLITS + split,
                mask=real & (split < count),
                other=float("-inf"),
                cache_modifier=".cg",
            ),
        )
    top = gl.where(top == float("-inf"), 0.0, top)
    total, acc = gl.zeros_like(top), gl.zeros([BLOCK_M, C], gl.float32, flat)
    for split in gl.static_range(SPLITS):
        at, held = (line + pair) * SPLITS + split, real & (split < count)
        weight = gl.exp2(
            gl.load(lse + at, mask=held, other=float("-inf"), cache_modifier=".cg") - top
        )
        value = gl.load(
            partial + at[:, None] * C + c[None, :],
            mask=held[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        total += weight
        acc += value.to(gl.float32) * weight[:, None]
    acc = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    gl.store(
        out + (line + pair)[:, None] * C + c[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None],
    )


@gluon.jit(do_not_specialize=["splits", "first_key", "width", "span", "table_stride"])
def mla_decode_hopper_kernel(
    query,
    latent_at,
    rope_at,
    page_table,
    kv_lens,
    tree_mask,
    out,
    lse,
    merged,
    tickets,
    scale,
    kv_scale,
    splits,
    first_key,
    width,
    span,
    heads,
    table_stride,
    C: gl.constexpr,
    R: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    TREE: gl.constexpr,
    MERGED_SPLITS: gl.constexpr,
    FLAT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute the same as ``mla_decode_kernel``, with the same arguments.

    ``latent_at`` and ``rope_at`` describe the cache [slots, C + R] in tiles of 64 rows of C and of
    R numbers. If MERGED_SPLITS (the number of splits) is not 0, the last program to finish for a
    block of queries merges the splits into ``merged`` [B * W, H, C]. ``_store`` explains
    FLAT, which is possible only below 64 pairs.
    """
    AXIS: gl.constexpr = 0 if BLOCK_M < 64 else 1  # axis of the keys
    s_layout: gl.constexpr = _score_layout(BLOCK_M, gl.num_warps())
    o_layout: gl.constexpr = _sum_layout(BLOCK_M, C, gl.num_warps())
    p_layout: gl.constexpr = gl.NVMMASharedLayout(min(BLOCK_M * 2, 128), 16, 2)
    dtype: gl.constexpr = query.dtype.element_ty
    m_layout: gl.constexpr = gl.SliceLayout(AXIS, s_layout)
    dependent_launch.begin(DEPENDENT)
    block, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    pairs = width * heads
    line = row.to(gl.int64) * pairs  # index of the row's first pair
    length = gl.load(kv_lens + row)
    each = gl.cdiv(gl.cdiv(length, TILE), splits) * TILE
    start = split * each
    end = gl.minimum(start + each, length)
    if SPLIT:
        if start >= end:
            dependent_launch.wait(DEPENDENT)
            if MERGED_SPLITS > 0:
                if (length <= 0) & (split == 0):  # no other program writes it
                    _merge_splits(out, lse, merged, line, block * BLOCK_M, pairs, 0, 0, C, BLOCK_M)
            return
    tiles, table = gl.cdiv(end - start, TILE), page_table + row * table_stride
    latent, rope, ready, wide, wide_r = start_pipeline(
        latent_at,
        rope_at,
        table,
        start,
        tiles,
        length - width,
        dtype,
        C,
        R,
        STAGES,
        PAGE,
        DEPENDENT,
    )
    q_c, q_r = load_queries(query + line * (C + R), block * BLOCK_M, pairs, dtype, C, R, BLOCK_M)
    p_smem = gl.allocate_shared_memory(
        dtype, [TILE, BLOCK_M] if AXIS == 0 else [BLOCK_M, TILE], p_layout
    )
    acc = gl.zeros([C, BLOCK_M] if AXIS == 0 else [BLOCK_M, C], gl.float32, o_layout)
    blank = gl.zeros([TILE, BLOCK_M] if AXIS == 0 else [BLOCK_M, TILE], gl.float32, s_layout)
    pair = block * BLOCK_M + gl.arange(0, BLOCK_M, m_layout)
    own = pair // heads
    tree = gl.load(tree_mask + row * width + own, mask=pair < pairs, other=1) if TREE else own
    begin = length - (span if TREE else width)
    top, total = gl.full([BLOCK_M], float("-inf"), gl.float32, m_layout), blank
    n = gl.arange(0, TILE, gl.SliceLayout(1 - AXIS, s_layout))
    for tile in range(tiles):
        stage, n0 = tile % STAGES, start + tile * TILE
        ahead, more = n0 + STAGES * TILE, tile + STAGES < tiles
        page = gl.load(table + ahead // PAGE, mask=more, other=0)
        mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
        here, here_r = take_tile(
            latent.index(stage), rope.index(stage), wide, wide_r, first_key - n0, end - n0, C, R
        )
        scores = _scores(q_c, q_r, here, here_r, blank, AXIS == 0)
        seen = _visible(n0 + n, begin, own, tree, first_key, end, AXIS, TREE)
        weights, kept, top, total = _weights(
            gl.where(seen, scores * scale, float("-inf")), top, total, AXIS
        )
        acc = _add(acc, kept, weights, p_smem, here, AXIS)
        barrier()
        if more:
            fetch_tile(
                latent_at,
                rope_at,
                page,
                ahead,
                latent.index(stage),
                rope.index(stage),
                ready.index(stage),
                PAGE,
            )
    at, norm = (line + pair) * splits + split, gl.sum(total, AXIS)
    if SPLIT:
        gl.store(lse + at, top + gl.log2(norm), mask=pair < pairs)
    _store(out, acc, norm, kv_scale, at, pair < pairs, C, AXIS, FLAT)
    if MERGED_SPLITS > 0:
        if _last_of(tickets + row * gl.num_programs(0) + block, gl.cdiv(length, each)):
            _merge_splits(
                out,
                lse,
                merged,
                line,
                block * BLOCK_M,
                pairs,
                gl.cdiv(length, each),
                MERGED_SPLITS,
                C,
                BLOCK_M,
            )


def tma_descriptors(kv: Tensor, lora: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return TMA descriptors of the cache kv [slots, C + R].

    The first covers its first ``lora`` columns, the second the rest, in tiles of 64 rows.
    """
    dtype = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float8_e4m3fn: gl.float8e4nv,
    }[kv.dtype]
    made = []
    for columns in (lora, kv.shape[1] - lora):
        block = [TILE.value, columns]
        made.append(
            TensorDescriptor.from_tensor(
                kv, block, gl.NVMMASharedLayout.get_default_for(block, dtype)
            )
        )
    return made[0], made[1]
