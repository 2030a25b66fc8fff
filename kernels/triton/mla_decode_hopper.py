"""Latent attention over a paged cache on Hopper, in Gluon: what ``mla_decode`` computes, with the copies and products of
this one architecture under control.

A ring of two tiles of 64 keys is refilled by the tensor memory accelerator as soon as a tile is done with, so that
memory never waits for arithmetic. Few pairs of query token and head (up to 32) are the columns of the score tile, whose
rows are the keys: then the cores work without padding. With 64 pairs two warp groups share their rows.
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

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
TILE = gl.constexpr(64)  #: keys
RING = gl.constexpr(2)


@gluon.jit
def _fetch(latent_at, rope_at, page, n0, latent, rope, ready, PAGE: gl.constexpr):
    """Begin to copy the tile at position ``n0`` of a row, which lies in ``page``."""
    slot = page * PAGE + n0 % PAGE
    mbarrier.expect(ready, latent_at.block_type.nbytes + rope_at.block_type.nbytes)
    copy_tile(latent_at, [slot, 0], ready, latent)
    copy_tile(rope_at, [slot, latent_at.block_type.shape[1]], ready, rope)


@gluon.jit
def _clear(tile, low, high, COLUMNS: gl.constexpr):
    """Zero the tile's rows before ``low`` and from ``high`` on: unwritten slots may hold NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    kept = (row >= low) & (row < high)
    for column in gl.static_range(0, COLUMNS, 64):
        part = tile.slice(column, 64, 1)
        value = part.load(layout)
        part.store(gl.where(kept[:, None], value, gl.zeros_like(value)))


@gluon.jit(do_not_specialize=["splits", "first_key", "width", "table_stride"])
def mla_decode_hopper_kernel(query, latent_at, rope_at, page_table, kv_lens, tree_mask, out, lse, scale, splits, first_key,
                             width, heads, table_stride, C: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr,
                             PAGE: gl.constexpr, SPLIT: gl.constexpr, TREE: gl.constexpr):
    """As ``mla_decode_kernel``, with the same arguments; ``latent_at`` and ``rope_at`` describe the cache [slots, C + R]
    in tiles of 64 rows of C and of R numbers."""
    SWAP: gl.constexpr = BLOCK_M < 64
    AXIS: gl.constexpr = 0 if SWAP else 1  # along which keys lie
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = latent_at.dtype
    block, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    length = gl.load(kv_lens + row)
    each = gl.cdiv(gl.cdiv(length, TILE), splits) * TILE
    start = split * each
    end = gl.minimum(start + each, length)
    if SPLIT:
        if start >= end:
            return
    tiles = gl.cdiv(end - start, TILE)
    table = page_table + row * table_stride

    latent = gl.allocate_shared_memory(dtype, [RING, TILE, C], latent_at.layout)
    rope = gl.allocate_shared_memory(dtype, [RING, TILE, R], rope_at.layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(RING):
        if i < tiles:
            first = start + i * TILE
            _fetch(latent_at, rope_at, gl.load(table + first // PAGE), first, latent.index(i), rope.index(i),
                   ready.index(i), PAGE)

    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    pair = block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, flat))
    q_at = query + (row * width * heads + pair).to(gl.int64)[:, None] * (C + R)
    c, r = gl.arange(0, C, gl.SliceLayout(0, flat)), gl.arange(0, R, gl.SliceLayout(0, flat))
    real = (pair < width * heads)[:, None]
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_c = gl.allocate_shared_memory(dtype, [BLOCK_M, C], q_layout, gl.load(q_at + c[None, :], mask=real, other=0.0))
    q_r = gl.allocate_shared_memory(dtype, [BLOCK_M, R], q_layout, gl.load(q_at + C + r[None, :], mask=real, other=0.0))

    if SWAP:
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
        o_layout: gl.constexpr = s_layout
        p_layout: gl.constexpr = gl.NVMMASharedLayout(BLOCK_M * 2, 16, 2)
        weights_smem = gl.allocate_shared_memory(dtype, [TILE, BLOCK_M], p_layout)
        acc = gl.zeros([C, BLOCK_M], gl.float32, o_layout)
        none = gl.zeros([TILE, BLOCK_M], gl.float32, s_layout)
    else:
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, TILE // (WARPS // 4), 16])
        o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256, 16])
        p_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        weights_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, TILE], p_layout)
        acc = gl.zeros([BLOCK_M, C], gl.float32, o_layout)
        none = gl.zeros([BLOCK_M, TILE], gl.float32, s_layout)
    m_layout: gl.constexpr = gl.SliceLayout(AXIS, s_layout)
    mine = block * BLOCK_M + gl.arange(0, BLOCK_M, m_layout)
    own = mine // heads
    last = length - width + own
    tree = gl.zeros_like(own).to(gl.int64)
    if TREE:
        tree = gl.load(tree_mask + row * width + own, mask=mine < width * heads, other=1)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, m_layout)
    total = none
    n = gl.arange(0, TILE, gl.SliceLayout(1 - AXIS, s_layout))

    for tile in range(tiles):
        stage, phase = tile % RING, (tile // RING) & 1
        n0 = start + tile * TILE
        ahead = n0 + RING * TILE
        more = tile + RING < tiles
        page = gl.load(table + ahead // PAGE, mask=more, other=0)
        here, here_r = latent.index(stage), rope.index(stage)
        mbarrier.wait(ready.index(stage), phase)
        if (n0 < first_key) | (n0 + TILE > end):
            _clear(here, first_key - n0, end - n0, C)
            _clear(here_r, first_key - n0, end - n0, R)
            fence_async_shared()
        if SWAP:
            scores = warpgroup_mma(here, q_c.permute((1, 0)), none, use_acc=False)
            scores = warpgroup_mma(here_r, q_r.permute((1, 0)), scores)
        else:
            scores = warpgroup_mma(q_c, here.permute((1, 0)), none, use_acc=False)
            scores = warpgroup_mma(q_r, here_r.permute((1, 0)), scores)
        pos = gl.expand_dims(n0 + n, 1 - AXIS)
        if TREE:
            index = pos - (length - width)
            bits = gl.expand_dims(tree, AXIS) >> gl.maximum(index, 0).to(gl.int64)
            seen = (index < 0) | ((bits & 1) != 0)
        else:
            seen = pos <= gl.expand_dims(last, AXIS)
        seen = seen & (pos >= first_key) & (pos < end)
        scores = gl.where(seen, scores * scale, float("-inf"))
        higher = gl.maximum(top, gl.max(scores, AXIS))
        base = gl.where(higher == float("-inf"), 0.0, higher)
        weights = gl.exp2(scores - gl.expand_dims(base, AXIS))
        kept = gl.exp2(top - base)
        total = total * gl.expand_dims(kept, AXIS) + weights
        top = higher
        weights_smem.store(weights.to(dtype))
        acc = acc * gl.expand_dims(gl.convert_layout(kept, gl.SliceLayout(AXIS, o_layout)), AXIS)
        fence_async_shared()
        if SWAP:
            acc = warpgroup_mma(here.permute((1, 0)), weights_smem, acc)
        else:
            acc = warpgroup_mma(weights_smem, here, acc)
        gl.thread_barrier()
        if more:
            _fetch(latent_at, rope_at, page, ahead, here, here_r, ready.index(stage), PAGE)

    norm = gl.sum(total, AXIS)
    line = (row * width * heads + mine).to(gl.int64) * splits + split
    if SPLIT:
        gl.store(lse + line, top + gl.log2(norm), mask=mine < width * heads)
    inverse = gl.convert_layout(1.0 / gl.where(norm == 0.0, 1.0, norm), gl.SliceLayout(AXIS, o_layout))
    o_line = gl.convert_layout(line, gl.SliceLayout(AXIS, o_layout))
    o_real = gl.convert_layout(mine, gl.SliceLayout(AXIS, o_layout)) < width * heads
    target = gl.expand_dims(o_line * C, AXIS) + gl.expand_dims(
        gl.arange(0, C, gl.SliceLayout(1 - AXIS, o_layout)), 1 - AXIS)
    result = (acc * gl.expand_dims(inverse, AXIS)).to(out.dtype.element_ty)
    gl.store(out + target, result, mask=gl.expand_dims(o_real, AXIS) & (target >= 0))


def described(kv: Tensor, lora: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The cache kv [slots, C + R] in tiles of its first ``lora`` numbers and of those behind them."""
    dtype = gl.bfloat16 if kv.dtype == torch.bfloat16 else gl.float16
    made = []
    for columns in (lora, kv.shape[1] - lora):
        block = [TILE.value, columns]
        made.append(TensorDescriptor.from_tensor(kv, block, gl.NVMMASharedLayout.get_default_for(block, dtype)))
    return made[0], made[1]
