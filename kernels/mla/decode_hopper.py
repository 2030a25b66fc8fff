"""Latent attention over a paged cache on Hopper, in Gluon.

It computes the same as ``mla_decode_kernel``, with explicit control over the copies and matrix
instructions of this architecture.

The tensor memory accelerator refills a ring of tiles of 64 keys: each buffer is refilled as soon as
its tile has been used, so that memory never waits for arithmetic. Tiles of an FP8 cache are widened
into one more buffer before they are multiplied. Up to 32 (query token, head) pairs are the columns
of the score tile, whose rows are the keys: then the tensor cores work without padding. With 64
pairs two warp groups share the rows of pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glowplug.kernels.launch import dependent_launch as dependent

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # name before and since Triton 3.7
TILE = gl.constexpr(64)  #: keys per tile


@gluon.jit
def _fetch(latent_at, rope_at, page, n0, latent, rope, ready, PAGE: gl.constexpr):
    """Start to copy the tile at position ``n0`` of a row, stored in ``page``."""
    slot = page * PAGE + n0 % PAGE
    mbarrier.expect(ready, latent_at.block_type.nbytes + rope_at.block_type.nbytes)
    copy_tile(latent_at, [slot, 0], ready, latent)
    copy_tile(rope_at, [slot, latent_at.block_type.shape[1]], ready, rope)


@gluon.jit
def _written():
    """Make shared memory stores of all threads visible to the tensor cores and to TMA copies.

    NOTE: the compiler adds neither the fence nor the barrier. Without the fence matrix instructions
    read the old contents, once in some thousand steps; without the barrier they begin before slower
    warps have stored.
    """
    fence_async_shared()
    barrier()


@gluon.jit
def _copy(source, target, low, high, COLUMNS: gl.constexpr):
    """Copy rows ``low`` to ``high`` of a tile in target's dtype, and zeros for the other rows.

    Unwritten slots may hold NaN, and 0 * NaN is NaN. Source and target may be the same.
    """
    STEP: gl.constexpr = min(COLUMNS, 128)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // STEP, STEP // 8], [gl.num_warps(), 1], [1, 0]
    )
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    kept = ((row >= low) & (row < high))[:, None]
    for column in gl.static_range(0, COLUMNS, STEP):
        value = source.slice(column, STEP, 1).load(layout)
        target.slice(column, STEP, 1).store(
            gl.where(kept, value.to(target.dtype), 0.0).to(target.dtype)
        )


@gluon.jit
def _take(latent, rope, wide, wide_r, low, high, C: gl.constexpr, R: gl.constexpr):
    """Return the operands for a tile that has arrived.

    They are the tile itself, or its widened copy if its dtype is narrower.
    """
    if latent.dtype == wide.dtype:
        if (low > 0) | (high < TILE):
            _copy(latent, latent, low, high, C)
            _copy(rope, rope, low, high, R)
            _written()
        return latent, rope
    else:
        _copy(latent, wide, low, high, C)
        _copy(rope, wide_r, low, high, R)
        _written()
        return wide, wide_r


@gluon.constexpr_function
def _score_layout(block_m, warps):
    """Return the layout of the scores.

    With few pairs the keys are rows, otherwise columns that two warp groups share.
    """
    if block_m < 64:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_m, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 64 // (warps // 4), 16])


@gluon.constexpr_function
def _sum_layout(block_m, columns, warps):
    """Return the layout of the accumulated output, arranged as the scores are."""
    if block_m < 64:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_m, 16])
    return gl.NVMMADistributedLayout(
        [3, 0], [4, warps // 4], [16, min(256, columns // (warps // 4)), 16]
    )


@gluon.jit
def _ring(
    latent_at,
    rope_at,
    table,
    start,
    tiles,
    known,
    dtype: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    RING: gl.constexpr,
    PAGE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Allocate shared memory for the ring of tiles and start the first copies.

    Returns latents, rotary parts, their barriers, and a widened tile of ``dtype`` if the cache has
    another dtype.

    NOTE: lengths, pages and the first ``known`` keys are older than the step's first kernel, so
    they are requested before the prologue ends, which adds the other keys. This saves 0.8, 1.9 and
    0.4 us of 17, 25 and 50 us at 8, 32 and 128 rows.
    """
    latent = gl.allocate_shared_memory(latent_at.dtype, [RING, TILE, C], latent_at.layout)
    rope = gl.allocate_shared_memory(latent_at.dtype, [RING, TILE, R], rope_at.layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=1)
    _written()
    for i in gl.static_range(RING):
        first = start + i * TILE
        if (i < tiles) & (first + TILE <= known):
            _fetch(
                latent_at,
                rope_at,
                gl.load(table + first // PAGE),
                first,
                latent.index(i),
                rope.index(i),
                ready.index(i),
                PAGE,
            )
    dependent.wait(DEPENDENT)
    for i in gl.static_range(RING):
        first = start + i * TILE
        if (i < tiles) & (first + TILE > known):
            _fetch(
                latent_at,
                rope_at,
                gl.load(table + first // PAGE),
                first,
                latent.index(i),
                rope.index(i),
                ready.index(i),
                PAGE,
            )
    if latent_at.dtype == dtype:
        return latent, rope, ready, latent.index(0), rope.index(0)
    else:
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        wide = gl.allocate_shared_memory(dtype, [TILE, C], shared)
        return latent, rope, ready, wide, gl.allocate_shared_memory(dtype, [TILE, R], shared)


@gluon.jit
def _queries(
    query,
    first,
    pairs,
    dtype: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Load BLOCK_M pairs from ``first`` of a row's ``pairs`` to shared memory as [M, C] and [M, R].

    ``query`` points at the first pair of the row.
    """
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pair = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, flat))
    at = query + pair[:, None] * (C + R)
    c, r = gl.arange(0, C, gl.SliceLayout(0, flat)), gl.arange(0, R, gl.SliceLayout(0, flat))
    real = (pair < pairs)[:, None]
    q_c = gl.allocate_shared_memory(
        dtype, [BLOCK_M, C], shared, gl.load(at + c[None, :], mask=real, other=0.0)
    )
    q_r = gl.allocate_shared_memory(
        dtype, [BLOCK_M, R], shared, gl.load(at + C + r[None, :], mask=real, other=0.0)
    )
    _written()
    return q_c, q_r


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

    The row's own tokens begin at ``begin``.
    """
    key = gl.expand_dims(pos, 1 - AXIS)
    if TREE:
        bits = gl.expand_dims(tree, AXIS) >> gl.maximum(key - begin, 0).to(gl.int64)
        seen = (key < begin) | ((bits & 1) != 0)
    else:
        seen = key <= gl.expand_dims(begin + own, AXIS)
    return seen & (key >= first_key) & (key < end)


@gluon.jit
def _weights(scores, top, total, AXIS: gl.constexpr):
    """Continue the softmax over one more tile.

    Returns its weights, the factor on the sums so far, and the new maximum and total.
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
    _written()
    if AXIS == 0:
        return warpgroup_mma(latent.permute((1, 0)), p_smem, acc)
    else:
        return warpgroup_mma(p_smem, latent, acc)


@gluon.jit
def _store(
    out, acc, norm, kv_scale, line, real, C: gl.constexpr, AXIS: gl.constexpr, FLAT: gl.constexpr
):
    """Store out[line] = acc / norm * kv_scale.

    FLAT (pairs are columns): store through shared memory, so that a thread writes 16 contiguous
    bytes of a pair rather than two.
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
    """Return whether this is the last of ``programs`` programs to arrive.

    The last one resets the ticket for the next step.
    """
    barrier()
    last = gl.atomic_add(tickets, 1, sem="acq_rel") == programs - 1
    if last:
        gl.store(tickets, 0)
    return last


@gluon.jit
def _join(
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
    """Merge ``count`` of SPLITS splits of BLOCK_M pairs from ``first``; no splits give zeros.

    ``line`` is the index of the first pair of the row.
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


@gluon.jit(do_not_specialize=["splits", "first_key", "width", "table_stride"])
def mla_decode_hopper_kernel(
    query,
    latent_at,
    rope_at,
    page_table,
    kv_lens,
    tree_mask,
    out,
    lse,
    joined,
    tickets,
    scale,
    kv_scale,
    splits,
    first_key,
    width,
    heads,
    table_stride,
    C: gl.constexpr,
    R: gl.constexpr,
    BLOCK_M: gl.constexpr,
    RING: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    TREE: gl.constexpr,
    JOIN: gl.constexpr,
    FLAT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute the same as ``mla_decode_kernel``, with the same arguments.

    ``latent_at`` and ``rope_at`` describe the cache [slots, C + R] in tiles of 64 rows of C and of
    R numbers. If JOIN (the number of splits) is not 0, the last program to finish for a block of
    queries merges the splits into ``joined`` [B * W, H, C]. For FLAT, only below 64 pairs, see
    ``_store``.
    """
    AXIS: gl.constexpr = 0 if BLOCK_M < 64 else 1  # axis of the keys
    s_layout: gl.constexpr = _score_layout(BLOCK_M, gl.num_warps())
    o_layout: gl.constexpr = _sum_layout(BLOCK_M, C, gl.num_warps())
    p_layout: gl.constexpr = gl.NVMMASharedLayout(min(BLOCK_M * 2, 128), 16, 2)
    dtype: gl.constexpr = query.dtype.element_ty
    m_layout: gl.constexpr = gl.SliceLayout(AXIS, s_layout)
    dependent.begin(DEPENDENT)
    block, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    pairs = width * heads
    line = row.to(gl.int64) * pairs  # index of the row's first pair
    length = gl.load(kv_lens + row)
    each = gl.cdiv(gl.cdiv(length, TILE), splits) * TILE
    start = split * each
    end = gl.minimum(start + each, length)
    if SPLIT:
        if start >= end:
            dependent.wait(DEPENDENT)
            if JOIN > 0:
                if (length <= 0) & (split == 0):  # no other program writes it
                    _join(out, lse, joined, line, block * BLOCK_M, pairs, 0, 0, C, BLOCK_M)
            return
    tiles, table = gl.cdiv(end - start, TILE), page_table + row * table_stride
    latent, rope, ready, wide, wide_r = _ring(
        latent_at, rope_at, table, start, tiles, length - width, dtype, C, R, RING, PAGE, DEPENDENT
    )
    q_c, q_r = _queries(query + line * (C + R), block * BLOCK_M, pairs, dtype, C, R, BLOCK_M)
    p_smem = gl.allocate_shared_memory(
        dtype, [TILE, BLOCK_M] if AXIS == 0 else [BLOCK_M, TILE], p_layout
    )
    acc = gl.zeros([C, BLOCK_M] if AXIS == 0 else [BLOCK_M, C], gl.float32, o_layout)
    blank = gl.zeros([TILE, BLOCK_M] if AXIS == 0 else [BLOCK_M, TILE], gl.float32, s_layout)
    pair = block * BLOCK_M + gl.arange(0, BLOCK_M, m_layout)
    own = pair // heads
    tree = gl.load(tree_mask + row * width + own, mask=pair < pairs, other=1) if TREE else own
    top, total = gl.full([BLOCK_M], float("-inf"), gl.float32, m_layout), blank
    n = gl.arange(0, TILE, gl.SliceLayout(1 - AXIS, s_layout))
    for tile in range(tiles):
        stage, n0 = tile % RING, start + tile * TILE
        ahead, more = n0 + RING * TILE, tile + RING < tiles
        page = gl.load(table + ahead // PAGE, mask=more, other=0)
        mbarrier.wait(ready.index(stage), (tile // RING) & 1)
        here, here_r = _take(
            latent.index(stage), rope.index(stage), wide, wide_r, first_key - n0, end - n0, C, R
        )
        scores = _scores(q_c, q_r, here, here_r, blank, AXIS == 0)
        seen = _visible(n0 + n, length - width, own, tree, first_key, end, AXIS, TREE)
        weights, kept, top, total = _weights(
            gl.where(seen, scores * scale, float("-inf")), top, total, AXIS
        )
        acc = _add(acc, kept, weights, p_smem, here, AXIS)
        barrier()
        if more:
            _fetch(
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
    if JOIN > 0:
        if _last_of(tickets + row * gl.num_programs(0) + block, gl.cdiv(length, each)):
            _join(
                out,
                lse,
                joined,
                line,
                block * BLOCK_M,
                pairs,
                gl.cdiv(length, each),
                JOIN,
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
