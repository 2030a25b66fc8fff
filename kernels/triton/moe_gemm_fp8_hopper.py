"""Grouped products of routed experts in block FP8 on Hopper for loads at which tensor cores are what takes time, in
Gluon: over an ``Alignment`` of 192 rows a block, with roles for warps.

Four warps fetch, three groups of four multiply 64 rows of a block each with the same weights, so that one's float32 sums
fall into the others' products. A group of 128 numbers of the depth is multiplied in E4M3, its result scaled by its row's
and its weight block's scales and added in float32. 64 rows that hold nothing but padding are neither fetched nor
multiplied: of an expert's rows 32 are wasted on average.
"""
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glowplug.kernels.triton import dependent
from glowplug.kernels.triton.moe_align import Alignment
from glowplug.kernels.triton.moe_gemm_hopper import copy_rows, copy_tile, halves, place_of, processors, store_rows
from glowplug.kernels.triton.tuned import Config

UNIT = 64  #: rows that a group of warps multiplies
COLUMNS = 128  #: of a tile, as many as a block of weights with one scale; half gates, half ups in the first product
DEPTH = 128
#: by 64 rows of a block: tiles that are on their way or being multiplied, registers of a thread that multiplies, fetches
RINGS = {2: (6, 216, 72), 3: (5, 160, 32)}


@gluon.jit
def _rows_of(sorted_pairs, place, pairs, depth, TOPK: gl.constexpr, DEPTH: gl.constexpr):
    """Where the rows of x of the 64 pairs at ``place`` and following begin, [64, DEPTH], and which are there."""
    flat: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    pair = gl.load(sorted_pairs + place + gl.arange(0, 64, gl.SliceLayout(1, flat)))
    row = gl.where(pair < pairs, pair // TOPK, 0)
    return row[:, None] * depth + gl.arange(0, DEPTH, gl.SliceLayout(0, flat))[None, :], (pair < pairs)[:, None]


@gluon.jit
def _fetch(given, UP: gl.constexpr, GATHER: gl.constexpr, TOPK: gl.constexpr, PARTS: gl.constexpr,
           COLUMNS: gl.constexpr, DEPTH: gl.constexpr, RING: gl.constexpr):
    """Every tile of this program: rows of x as far as there are pairs, and of its expert's weight."""
    (x, x_at, w_at, sorted_pairs, expert_of_block, m_blocks, n_blocks, group, pairs, columns, depth, x_ring, w_ring,
     full, empty) = given
    size: gl.constexpr = COLUMNS * DEPTH
    unit: gl.constexpr = 64 * DEPTH
    step = 0
    for tile in range(gl.program_id(0), m_blocks * n_blocks, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        expert = gl.load(expert_of_block + block)
        place = block * (64 * PARTS)
        if GATHER:
            rows_0, real_0 = _rows_of(sorted_pairs, place, pairs, depth, TOPK, DEPTH)
            rows_1, real_1 = _rows_of(sorted_pairs, place + 64, pairs, depth, TOPK, DEPTH)
            if PARTS == 3:
                rows_2, real_2 = _rows_of(sorted_pairs, place + 128, pairs, depth, TOPK, DEPTH)
        else:
            second_there = gl.load(sorted_pairs + place + 64) < pairs
            third_there = second_there & (PARTS == 3)
            if PARTS == 3:
                third_there = gl.load(sorted_pairs + place + 128) < pairs
        first = expert * columns + column_block * COLUMNS
        second = first + COLUMNS // 2
        if UP:
            first = expert * 2 * columns + column_block * (COLUMNS // 2)
            second = first + columns
        for start in range(0, depth, DEPTH):
            stage = step % RING
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // RING) & 1) ^ 1)
            if GATHER:
                mbarrier.expect(ready, size)
            else:
                mbarrier.expect(ready, size + unit, pred=second_there == 0)
                mbarrier.expect(ready, size + 2 * unit, pred=second_there & (third_there == 0))
                mbarrier.expect(ready, size + 3 * unit, pred=third_there)
            copy_tile(w_at, [first, start], ready, w_ring.index(2 * stage))
            copy_tile(w_at, [second, start], ready, w_ring.index(2 * stage + 1))
            if GATHER:
                copy_rows(x_ring.index(PARTS * stage), x + start + rows_0, mask=real_0)
                copy_rows(x_ring.index(PARTS * stage + 1), x + start + rows_1, mask=real_1)
                if PARTS == 3:
                    copy_rows(x_ring.index(PARTS * stage + 2), x + start + rows_2, mask=real_2)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                copy_tile(x_at, [place, start], ready, x_ring.index(PARTS * stage))
                copy_tile(x_at, [place + 64, start], ready, x_ring.index(PARTS * stage + 1), pred=second_there)
                if PARTS == 3:
                    copy_tile(x_at, [place + 128, start], ready, x_ring.index(PARTS * stage + 2), pred=third_there)
            step += 1


@gluon.jit
def _add(total, part, scale):
    """total + part * scale by rows; ``scale`` [64] in the layout that part's rows had before they were cut."""
    return total + part * gl.convert_layout(scale, gl.SliceLayout(1, part.type.layout))[:, None]


@gluon.jit
def _cut(value):
    """value [M, N] -> its halves [M, N / 2]."""
    return value.reshape([value.shape[0], 2, value.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _multiply(given, PART: gl.constexpr, UP: gl.constexpr, GATHER: gl.constexpr, TOPK: gl.constexpr,
              PARTS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, RING: gl.constexpr):
    """The 64 rows from 64 * PART on of every tile of this program."""
    (x_scales, w_scales, out, weights, sorted_pairs, expert_of_block, m_blocks, n_blocks, group, pairs, columns, depth, x_stride,
     x_ring, w_ring, full, empty) = given
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    side: gl.constexpr = gl.SliceLayout(1, acc_layout)
    step = 0
    steps = depth // DEPTH
    tiles = m_blocks * n_blocks
    first = gl.program_id(0)
    block, _ = place_of(first, m_blocks, n_blocks, group)
    expert = gl.load(expert_of_block + block, mask=first < tiles, other=0)
    leader = gl.load(sorted_pairs + (block * PARTS + PART) * 64, mask=first < tiles, other=pairs)
    for tile in range(first, tiles, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        row = (block * PARTS + PART) * 64 + gl.arange(0, 64, side)
        filled = leader < pairs
        if UP:
            w_at = w_scales + (expert * (2 * columns // 128) + column_block // 2) * steps
            w_up = w_at + columns // 128 * steps
        else:
            w_at = w_scales + (expert * (columns // 128) + column_block) * steps
            w_up = w_at
        after = tile + gl.num_programs(0)
        next_block, _ = place_of(after, m_blocks, n_blocks, group)
        expert = gl.load(expert_of_block + next_block, mask=after < tiles, other=0)
        leader = gl.load(sorted_pairs + (next_block * PARTS + PART) * 64, mask=after < tiles, other=pairs)
        if filled:
            pair = gl.load(sorted_pairs + row)
            x_at = x_scales + (gl.where(pair < pairs, pair // TOPK, 0) if GATHER else row)
            x_scale = gl.load(x_at)
            scale, up_scale = gl.load(w_at), gl.load(w_up)
            none = gl.zeros([64, COLUMNS], gl.float32, acc_layout)
            if UP:
                gate, up = _cut(none)
            else:
                gate, up = none, 0.0
            for k in range(steps):
                stage = step % RING
                ahead = gl.minimum(k + 1, steps - 1)
                x_next = gl.load(x_at + ahead * x_stride)
                next_scale, next_up = gl.load(w_at + ahead), gl.load(w_up + ahead)
                mbarrier.wait(full.index(stage), (step // RING) & 1)
                if GATHER:
                    fence_async_shared()
                part = warpgroup_mma(x_ring.index(PARTS * stage + PART), w_ring.index(stage).permute((1, 0)), none,
                                     use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage), count=1)
                if UP:
                    gate_part, up_part = _cut(part)
                    gate = _add(gate, gate_part, x_scale * scale)
                    up = _add(up, up_part, x_scale * up_scale)
                else:
                    gate += part * (x_scale * scale)[:, None]
                x_scale, scale, up_scale = x_next, next_scale, next_up
                step += 1
            real = (pair < pairs).to(gl.int32)
            if UP:
                store_rows(out, gate / (1.0 + gl.exp(-gate)) * up, pair if GATHER else row, real,
                           column_block * (COLUMNS // 2), columns)
            else:
                gate = gate * gl.load(weights + pair, mask=pair < pairs, other=0.0)[:, None]
                low, high = _cut(gate)
                store_rows(out, low, pair, real, column_block * COLUMNS, columns)
                store_rows(out, high, pair, real, column_block * COLUMNS + COLUMNS // 2, columns)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(step % RING), (step // RING) & 1)
                mbarrier.arrive(empty.index(step % RING), count=1)
                step += 1


@gluon.jit(do_not_specialize=["pairs", "group", "x_stride"])
def _grouped_fp8_hopper(x, x_at, w_at, x_scales, w_scales, out, weights, sorted_pairs, expert_of_block, num_padded,
                        pairs, columns, depth, n_blocks, group, x_stride, UP: gl.constexpr, GATHER: gl.constexpr,
                        TOPK: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
                        RING: gl.constexpr, MULTIPLYING: gl.constexpr, FETCHING: gl.constexpr,
                        DEPENDENT: gl.constexpr):
    """``x_at``, ``w_at``: tiles of 64 rows of E4M3 [R, depth] and [E * N, depth]. ``x_scales`` [depth / 128, x_stride],
    ``w_scales`` [E, N / 128, depth / 128]. ``out`` [., columns]: N, or with ``UP`` N / 2, gated."""
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [RING * PARTS, 64, DEPTH], shared)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, COLUMNS, DEPTH], shared)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    m_blocks = gl.load(num_padded) // (64 * PARTS)
    given = (x_scales, w_scales, out, weights, sorted_pairs, expert_of_block, m_blocks, n_blocks, group, pairs, columns,
             depth, x_stride, x_ring, w_ring, full, empty)
    fetched = (x, x_at, w_at, sorted_pairs, expert_of_block, m_blocks, n_blocks, group, pairs, columns, depth, x_ring,
               halves(w_ring, shared), full, empty)
    if PARTS == 2:
        gl.warp_specialize([
            (_multiply, (given, gl.constexpr(0), UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
            (_multiply, (given, gl.constexpr(1), UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
            (_fetch, (fetched, UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING))],
            [4, 4], [MULTIPLYING, FETCHING])
    else:
        gl.warp_specialize([
            (_multiply, (given, gl.constexpr(0), UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
            (_multiply, (given, gl.constexpr(1), UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
            (_multiply, (given, gl.constexpr(2), UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
            (_fetch, (fetched, UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING))],
            [4, 4, 4], [MULTIPLYING, MULTIPLYING, FETCHING])


def _tiled(value: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(value.view(-1, value.shape[-1]), [UNIT, DEPTH],
                                        gl.NVMMASharedLayout(128, 8, 2))


def _launch(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor, weights: Tensor | None,
            order: Alignment, pairs: int, topk: int, config: Config) -> Tensor:
    depth, columns, up = x.shape[1], out.shape[1], weights is None
    assert depth % DEPTH == 0 and columns % COLUMNS == 0 and x_scales.stride(0) == 1, "sizes that tiles do not fit"
    parts = config["BLOCK_M"] // UNIT
    ring, multiplying, fetching = RINGS[parts]
    n_blocks = columns // (COLUMNS // 2 if up else COLUMNS)
    programs = min(processors(x.device), len(order.expert_of_block) * n_blocks)
    _grouped_fp8_hopper[(programs,)](
        x, _tiled(x), _tiled(weight), x_scales, scales, out, x_scales if up else weights, order.sorted_pairs,
        order.expert_of_block, order.num_padded, pairs, columns, depth, n_blocks, config["GROUP"], x_scales.stride(1),
        UP=up, GATHER=bool(config["GATHER"]), TOPK=topk, PARTS=parts, COLUMNS=COLUMNS, DEPTH=DEPTH, RING=ring,
        MULTIPLYING=multiplying, FETCHING=fetching, num_warps=4, **dependent.options())
    return out


def gated(x: Tensor, x_scales: Tensor, w13: Tensor, scales13: Tensor, order: Alignment, pairs: int, topk: int,
          dtype: torch.dtype, config: Config) -> Tensor:
    """silu(gate) * up of every pair, [T * K, I], of tokens x E4M3 [T, H], w13 E4M3 [E, 2I, H].

    Without ``GATHER`` x is in order of experts, [R, H], and so is what is returned. ``dtype``: of 16 bits.
    """
    out = torch.empty(pairs if config["GATHER"] else len(x), w13.shape[1] // 2, dtype=dtype, device=x.device)
    return _launch(x, x_scales, w13, scales13, out, None, order, pairs, topk, config)


def down(h: Tensor, h_scales: Tensor, w2: Tensor, scales2: Tensor, order: Alignment, weights: Tensor,
         dtype: torch.dtype, config: Config) -> Tensor:
    """h E4M3 [T * K, I] (without ``GATHER`` in order of experts), w2 E4M3 [E, H, I], weights float32 [T, K] -> weighted
    rows [T * K, H]."""
    out = torch.empty(weights.numel(), w2.shape[1], dtype=dtype, device=h.device)
    return _launch(h, h_scales, w2, scales2, out, weights, order, weights.numel(), 1, config)
