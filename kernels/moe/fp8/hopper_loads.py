"""Loads of the warp-specialised FP8 GEMM of ``moe.fp8.gemm_hopper``, by one warp, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from glowplug.kernels.moe.hopper_tiles import copy_rows, copy_tile, place_of


@gluon.jit
def load_tiles(
    given,
    UP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load x, the expert's weight and the scales for every tile of this program, by one warp.

    Blocks of 64 rows of x that are all padding are not loaded.
    """
    (
        x_at,
        w_at,
        x_scales,
        w_scales,
        sorted_pairs,
        expert_of_block,
        m_blocks,
        n_blocks,
        group,
        pairs,
        columns,
        depth,
        x_stride,
        x_ring,
        w_ring,
        x_scale_ring,
        w_scale_ring,
        full,
        empty,
    ) = given
    size: gl.constexpr = COLUMNS * DEPTH
    unit: gl.constexpr = 64 * DEPTH
    by_row: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    by_half: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 256, by_row)
    half = gl.arange(0, 128, by_half) // 64
    steps = depth // DEPTH
    step = 0
    for tile in range(gl.program_id(0), m_blocks * n_blocks, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        expert = gl.load(expert_of_block + block)
        place = block * (64 * WARPGROUPS)
        second_there = gl.load(sorted_pairs + place + 64) < pairs
        third_there = gl.load(sorted_pairs + place + 128) < pairs
        first = expert * columns + column_block * COLUMNS
        second = first + COLUMNS // 2
        scales_at = w_scales + (expert * (columns // 128) + column_block) * steps + half * 0
        if UP:
            first = expert * 2 * columns + column_block * (COLUMNS // 2)
            second = first + columns
            scales_at = (
                w_scales
                + (expert * (2 * columns // 128) + column_block // 2 + half * (columns // 128))
                * steps
            )
        for k in range(steps):
            stage = step % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, size + unit, pred=second_there == 0)
            mbarrier.expect(ready, size + 2 * unit, pred=second_there & (third_there == 0))
            mbarrier.expect(ready, size + 3 * unit, pred=third_there)
            copy_tile(w_at, [first, k * DEPTH], ready, w_ring.index(2 * stage))
            copy_tile(w_at, [second, k * DEPTH], ready, w_ring.index(2 * stage + 1))
            copy_tile(x_at, [place, k * DEPTH], ready, x_ring.index(WARPGROUPS * stage))
            copy_tile(
                x_at,
                [place + 64, k * DEPTH],
                ready,
                x_ring.index(WARPGROUPS * stage + 1),
                pred=second_there,
            )
            copy_tile(
                x_at,
                [place + 128, k * DEPTH],
                ready,
                x_ring.index(WARPGROUPS * stage + 2),
                pred=third_there,
            )
            copy_rows(
                x_scale_ring.index(stage),
                x_scales + k * x_stride + place + lane,
                mask=lane < 64 * WARPGROUPS,
            )
            copy_rows(w_scale_ring.index(stage), scales_at + k)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            step += 1
