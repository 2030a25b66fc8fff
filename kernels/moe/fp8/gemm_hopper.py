"""Warp-specialised grouped GEMMs of routed experts in block FP8 on Hopper, in Gluon.

They run over an ``Alignment`` of 192 rows per block, for loads that are limited by the tensor
cores. One warp loads. Three warpgroups multiply 64 rows of a block each by the same weights, so
that the float32 sums of one overlap the MMAs of the others. A depth group of 128 numbers is
multiplied in E4M3. The result is multiplied by the scales of the row and of the weight block, which
are loaded with the tiles, and summed in float32. 64 rows that are all padding are neither loaded
nor multiplied, so that an expert wastes 32 rows on average.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import Alignment
from glowplug.kernels.moe.fp8.hopper_loads import load_tiles
from glowplug.kernels.moe.gemm_hopper import processors
from glowplug.kernels.moe.hopper_tiles import (
    halves,
    pass_over,
    place_of,
    split_columns,
    store_gated,
    store_weighted,
)

UNIT = 64  #: rows that a warpgroup multiplies
WARPGROUPS = 3  #: warpgroups that share a tile's weights
#: columns of a tile, equal to those of a weight block; half gates, half ups in the first GEMM
COLUMNS = 128
DEPTH = 128  #: depth of a pipeline stage
STAGES = 5  #: pipeline stages
MULTIPLYING = 160  #: registers of each thread that multiplies
FETCHING = 32  #: registers of each thread that loads


@gluon.jit
def _add(total, part, scale):
    """Return total + part * scale by rows.

    ``scale`` [64] has the layout of the rows before ``split_columns`` split them.
    """
    return total + part * gl.convert_layout(scale, gl.SliceLayout(1, part.type.layout))[:, None]


@gluon.jit
def _multiply_group(
    rings,
    full,
    empty,
    step,
    none,
    WARPGROUP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply one depth group of a warpgroup's 64 rows by the expert's weight.

    Returns:
        The unscaled result, in the layout of ``none``, and the row scales of the left and of the
        right half of its columns.
    """
    x_ring, w_ring, x_scale_ring, w_scale_ring = rings
    side: gl.constexpr = gl.SliceLayout(1, none.type.layout)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    part = warpgroup_mma(
        x_ring.index(WARPGROUPS * stage + WARPGROUP),
        w_ring.index(stage).permute((1, 0)),
        none,
        use_acc=False,
        is_async=True,
    )
    x_scale = x_scale_ring.index(stage).slice(WARPGROUP * 64, 64).load(side)
    first = x_scale * w_scale_ring.index(stage).slice(0, 64).load(side)
    second = x_scale * w_scale_ring.index(stage).slice(64, 64).load(side)
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(empty.index(stage), count=1)
    return part, first, second


@gluon.jit
def _multiply(
    given,
    WARPGROUP: gl.constexpr,
    UP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply the 64 rows of warpgroup ``WARPGROUP`` in every tile of this program."""
    (
        out,
        weights,
        sorted_pairs,
        m_blocks,
        n_blocks,
        group,
        pairs,
        columns,
        depth,
        rings,
        full,
        empty,
    ) = given
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    side: gl.constexpr = gl.SliceLayout(1, acc_layout)
    step = 0
    steps = depth // DEPTH
    tiles = m_blocks * n_blocks
    first = gl.program_id(0)
    block, _ = place_of(first, m_blocks, n_blocks, group)
    leader = gl.load(
        sorted_pairs + (block * WARPGROUPS + WARPGROUP) * 64, mask=first < tiles, other=pairs
    )
    for tile in range(first, tiles, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        row = (block * WARPGROUPS + WARPGROUP) * 64 + gl.arange(0, 64, side)
        filled = leader < pairs
        after = tile + gl.num_programs(0)
        next_block, _ = place_of(after, m_blocks, n_blocks, group)
        leader = gl.load(
            sorted_pairs + (next_block * WARPGROUPS + WARPGROUP) * 64,
            mask=after < tiles,
            other=pairs,
        )
        if filled:
            none = gl.zeros([64, COLUMNS], gl.float32, acc_layout)
            if UP:
                gate, up = split_columns(none)
            else:
                gate, up = none, 0.0
            for _ in range(steps):
                part, gate_scale, up_scale = _multiply_group(
                    rings, full, empty, step, none, WARPGROUP, WARPGROUPS, STAGES
                )
                if UP:
                    gate_part, up_part = split_columns(part)
                    gate = _add(gate, gate_part, gate_scale)
                    up = _add(up, up_part, up_scale)
                else:
                    gate += part * gate_scale[:, None]
                step += 1
            pair = gl.load(sorted_pairs + row)
            real = (pair < pairs).to(gl.int32)
            if UP:
                store_gated(out, gate, up, row, real, column_block, columns)
            else:
                store_weighted(out, gate, weights, pair, pairs, pair, real, column_block, columns)
        else:
            step = pass_over(full, empty, step, steps, STAGES)


@gluon.jit(do_not_specialize=["pairs", "group"])
def _grouped_fp8_hopper(
    x_at,
    w_at,
    x_scales,
    w_scales,
    out,
    weights,
    sorted_pairs,
    expert_of_block,
    num_padded,
    pairs,
    columns,
    depth,
    n_blocks,
    group,
    x_stride,
    UP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute one grouped GEMM, with ``UP`` followed by silu(gate) * up.

    ``x_at`` and ``w_at`` are TMA descriptors of E4M3 [R, depth] and [E * N, depth] in tiles of 64
    rows. ``x_scales`` is [depth / 128, x_stride], ``w_scales`` [E, N / 128, depth / 128]. ``out``
    has N columns, with ``UP`` N / 2.
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * WARPGROUPS, 64, DEPTH], shared)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, DEPTH], shared)
    x_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 256], plain)
    w_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33)  # expected bytes + each lane's scales
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    m_blocks = gl.load(num_padded) // (64 * WARPGROUPS)
    given = (
        out,
        weights,
        sorted_pairs,
        m_blocks,
        n_blocks,
        group,
        pairs,
        columns,
        depth,
        (x_ring, w_ring, x_scale_ring, w_scale_ring),
        full,
        empty,
    )
    fetched = (
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
        halves(w_ring, shared),
        x_scale_ring,
        w_scale_ring,
        full,
        empty,
    )
    gl.warp_specialize(
        [
            (_multiply, (given, gl.constexpr(0), UP, WARPGROUPS, COLUMNS, DEPTH, STAGES)),
            (_multiply, (given, gl.constexpr(1), UP, WARPGROUPS, COLUMNS, DEPTH, STAGES)),
            (_multiply, (given, gl.constexpr(2), UP, WARPGROUPS, COLUMNS, DEPTH, STAGES)),
            (load_tiles, (fetched, UP, WARPGROUPS, COLUMNS, DEPTH, STAGES)),
        ],
        [4, 4, 1],
        [MULTIPLYING, MULTIPLYING, FETCHING],
    )


def _tiled(value: Tensor) -> TensorDescriptor:
    """Return a TMA descriptor of ``value`` in tiles of ``UNIT`` x ``DEPTH``."""
    return TensorDescriptor.from_tensor(
        value.view(-1, value.shape[-1]), [UNIT, DEPTH], gl.NVMMASharedLayout(128, 8, 2)
    )


def _launch(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    out: Tensor,
    weights: Tensor | None,
    order: Alignment,
    pairs: int,
    config: Config,
) -> Tensor:
    """Launch the second grouped GEMM, or the first if ``weights`` is None; return ``out``."""
    depth = x.shape[1]
    columns = out.shape[1]
    up = weights is None
    assert depth % DEPTH == 0 and columns % COLUMNS == 0 and x_scales.stride(0) == 1, (
        "these sizes do not fit the kernel's tiles"
    )
    # the kernel reads the scales of all positions in use, without a bound
    assert len(x) == len(order.sorted_pairs), "x has no row for each position of the alignment"
    n_blocks = columns // (COLUMNS // 2 if up else COLUMNS)
    programs = min(processors(x.device), len(order.expert_of_block) * n_blocks)
    _grouped_fp8_hopper[(programs,)](
        _tiled(x),
        _tiled(weight),
        x_scales,
        scales,
        out,
        x_scales if up else weights,
        order.sorted_pairs,
        order.expert_of_block,
        order.num_padded,
        pairs,
        columns,
        depth,
        n_blocks,
        config["GROUP"],
        x_scales.stride(1),
        UP=up,
        WARPGROUPS=WARPGROUPS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        MULTIPLYING=MULTIPLYING,
        FETCHING=FETCHING,
        num_warps=4,
        **dependent_launch.options(),
    )
    return out


def gated(
    rows: Tensor,
    row_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    order: Alignment,
    pairs: int,
    dtype: torch.dtype,
    config: Config,
) -> Tensor:
    """Compute silu(gate) * up of sorted rows.

    Args:
        rows: E4M3 [R, H], sorted by ``order``.
        row_scales: float32 [R, H / 128], column-major.
        w13: E4M3 [E, 2I, H].
        scales13: float32 [E, 2I / 128, H / 128].
        order: The alignment.
        pairs: Number of pairs.
        dtype: Result's dtype, of 16 bits.
        config: Configuration with the key ``GROUP``.

    Returns:
        [R, I]. Rows of padding are not written.
    """
    out = torch.empty(len(rows), w13.shape[1] // 2, dtype=dtype, device=rows.device)
    return _launch(rows, row_scales, w13, scales13, out, None, order, pairs, config)


def product(
    h: Tensor,
    h_scales: Tensor,
    w2: Tensor,
    scales2: Tensor,
    order: Alignment,
    weights: Tensor,
    dtype: torch.dtype,
    config: Config,
) -> Tensor:
    """Compute the second GEMM, times the routing weights.

    Args:
        h: E4M3 [R, I], sorted by ``order``, from ``experts.hopper_gated_product``.
        h_scales: float32 [R, I / 128], column-major.
        w2: E4M3 [E, H, I].
        scales2: float32 [E, H / 128, I / 128].
        order: The alignment.
        weights: float32 [T, K].
        dtype: Result's dtype, of 16 bits.
        config: Configuration with the key ``GROUP``.

    Returns:
        [T * K, H], one row per pair.
    """
    out = torch.empty(weights.numel(), w2.shape[1], dtype=dtype, device=h.device)
    return _launch(h, h_scales, w2, scales2, out, weights, order, weights.numel(), config)
