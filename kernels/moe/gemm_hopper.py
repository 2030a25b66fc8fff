"""Warp-specialised grouped GEMMs of routed experts on Hopper, in Gluon.

They compute the same as ``moe.gemm`` over an ``Alignment`` of 128 or 192 rows per tile, for loads
that are limited by the tensor cores. Four warps load; two or three warpgroups multiply 64 rows of a
tile each, so that the epilogue of one (silu, routing weight, stores) overlaps the MMAs of another.
The kernel is persistent: a program computes one tile after another. 64 rows that are all padding
are not multiplied and, where rows are gathered, not loaded.
"""

from __future__ import annotations

from functools import cache

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
from glowplug.kernels.moe.hopper_tiles import (
    halves,
    load_tiles,
    pass_over,
    place_of,
    split_columns,
    store_gated,
    store_weighted,
)

COLUMNS = 256  #: columns of a tile; half gates and half ups in the first GEMM
DEPTH = 64  #: depth of a pipeline stage
#: rows of a tile / 64 -> (pipeline stages, registers of a multiplying and of a loading thread)
PIPELINES = {2: (4, 216, 72), 3: (3, 160, 32)}


@gluon.jit
def _multiply(
    given,
    WARPGROUP: gl.constexpr,
    UP: gl.constexpr,
    GATHER: gl.constexpr,
    TOPK: gl.constexpr,
    KEPT: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
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
        x_ring,
        w_ring,
        full,
        empty,
        turn,
    ) = given
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS if WARPGROUPS == 2 else 128, 16]
    )
    side: gl.constexpr = gl.SliceLayout(1, acc_layout)
    step = 0
    steps = gl.cdiv(depth, DEPTH)
    tiles = m_blocks * n_blocks
    first = gl.program_id(0)
    block, column_block = place_of(first, m_blocks, n_blocks, group)
    leader = gl.load(
        sorted_pairs + (block * WARPGROUPS + WARPGROUP) * 64, mask=first < tiles, other=pairs
    )
    if WARPGROUP > 0:
        if LEAD > 0:
            if first < tiles:
                mbarrier.wait(turn, 0)
    for tile in range(first, tiles, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        place = (block * WARPGROUPS + WARPGROUP) * 64 + gl.arange(0, 64, side)
        pair = gl.load(sorted_pairs + place)
        filled = leader < pairs
        after = tile + gl.num_programs(0)
        next_block, _ = place_of(after, m_blocks, n_blocks, group)
        leader = gl.load(
            sorted_pairs + (next_block * WARPGROUPS + WARPGROUP) * 64,
            mask=after < tiles,
            other=pairs,
        )
        if filled:
            acc = gl.zeros([64, COLUMNS], gl.float32, acc_layout)
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                if GATHER:
                    fence_async_shared()
                acc = warpgroup_mma(
                    x_ring.index(WARPGROUPS * stage + WARPGROUP),
                    w_ring.index(stage).permute((1, 0)),
                    acc,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(1, deps=[acc])
                if k > 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
                if WARPGROUP == 0:
                    if step == LEAD - 1:
                        mbarrier.arrive(turn, count=1)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            real = (pair < pairs).to(gl.int32)
            if UP:
                gate, up = split_columns(acc)
                store_gated(out, gate, up, place, real, column_block, columns)
            else:
                row = pair
                if KEPT < TOPK:
                    row = pair // TOPK * KEPT + pair % TOPK
                store_weighted(out, acc, weights, pair, pairs, row, real, column_block, columns)
        else:
            step = pass_over(full, empty, step, steps, STAGES)


@gluon.jit(do_not_specialize=["pairs", "group"])
def _grouped_hopper(
    x,
    x_at,
    w_at,
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
    UP: gl.constexpr,
    GATHER: gl.constexpr,
    TOPK: gl.constexpr,
    KEPT: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute the same as ``moe.gemm._grouped`` over sorted pairs.

    ``x_at`` and ``w_at`` are TMA descriptors of x and w. With ``GATHER`` x is gathered instead.
    The first warpgroup starts ``LEAD`` steps before the others, and stays ahead of them.
    """
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    dtype: gl.constexpr = out.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, 64, DEPTH], shared)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, DEPTH], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    mbarrier.init(turn, count=1)
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
        x_ring,
        w_ring,
        full,
        empty,
        turn,
    )
    fetched = (
        x,
        x_at,
        w_at,
        sorted_pairs,
        expert_of_block,
        m_blocks,
        n_blocks,
        group,
        pairs,
        columns,
        depth,
        x_ring,
        halves(w_ring, shared),
        full,
        empty,
    )
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        given,
                        gl.constexpr(0),
                        UP,
                        GATHER,
                        TOPK,
                        KEPT,
                        WARPGROUPS,
                        COLUMNS,
                        DEPTH,
                        STAGES,
                        LEAD,
                    ),
                ),
                (
                    _multiply,
                    (
                        given,
                        gl.constexpr(1),
                        UP,
                        GATHER,
                        TOPK,
                        KEPT,
                        WARPGROUPS,
                        COLUMNS,
                        DEPTH,
                        STAGES,
                        LEAD,
                    ),
                ),
                (load_tiles, (fetched, UP, GATHER, TOPK, WARPGROUPS, COLUMNS, DEPTH, STAGES)),
            ],
            [4, 4],
            [MULTIPLYING, FETCHING],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        given,
                        gl.constexpr(0),
                        UP,
                        GATHER,
                        TOPK,
                        KEPT,
                        WARPGROUPS,
                        COLUMNS,
                        DEPTH,
                        STAGES,
                        LEAD,
                    ),
                ),
                (
                    _multiply,
                    (
                        given,
                        gl.constexpr(1),
                        UP,
                        GATHER,
                        TOPK,
                        KEPT,
                        WARPGROUPS,
                        COLUMNS,
                        DEPTH,
                        STAGES,
                        LEAD,
                    ),
                ),
                (
                    _multiply,
                    (
                        given,
                        gl.constexpr(2),
                        UP,
                        GATHER,
                        TOPK,
                        KEPT,
                        WARPGROUPS,
                        COLUMNS,
                        DEPTH,
                        STAGES,
                        LEAD,
                    ),
                ),
                (load_tiles, (fetched, UP, GATHER, TOPK, WARPGROUPS, COLUMNS, DEPTH, STAGES)),
            ],
            [4, 4, 4],
            [MULTIPLYING, MULTIPLYING, FETCHING],
        )


def card_is_hopper() -> bool:
    """Return whether the GPU is a Hopper; later GPUs have no warpgroup MMA (wgmma)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiled(value: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor of ``value`` in tiles of ``rows`` x ``DEPTH``."""
    return TensorDescriptor.from_tensor(
        value.view(-1, value.shape[-1]), [rows, DEPTH], gl.NVMMASharedLayout(128, 16, 2)
    )


def _launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    weights: Tensor | None,
    aligned: Alignment,
    pairs: int,
    topk: int,
    kept: int,
    config: Config,
) -> Tensor:
    """Launch the second grouped GEMM, or the first if ``weights`` is None; return ``out``.

    Of the ``topk`` columns of ids, the second GEMM has result rows for the first ``kept``.
    """
    columns = out.shape[-1]
    depth = w.shape[2]
    width = COLUMNS // (2 if weights is None else 1)
    assert depth % DEPTH == 0 and columns % 8 == 0 and x.element_size() == 2, (
        "these sizes do not fit the kernel's tiles"
    )
    n_blocks = -(-columns // width)
    warpgroups = config["block_m"] // 64
    stages, multiplying, fetching = PIPELINES[warpgroups]
    programs = min(processors(x.device), len(aligned.expert_of_block) * n_blocks)
    _grouped_hopper[(programs,)](
        x,
        _tiled(x, 64),
        _tiled(w, COLUMNS // 2),
        out,
        out if weights is None else weights,
        aligned.sorted_pairs,
        aligned.expert_of_block,
        aligned.num_padded,
        pairs,
        columns,
        depth,
        n_blocks,
        config["group"],
        UP=weights is None,
        GATHER=weights is None,
        TOPK=topk,
        KEPT=kept,
        WARPGROUPS=warpgroups,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        STAGES=stages,
        LEAD=min(config["lead"], depth // DEPTH),
        MULTIPLYING=multiplying,
        FETCHING=fetching,
        num_warps=4,
        **dependent_launch.options(),
    )
    return out


def up(x: Tensor, w13: Tensor, ids: Tensor, aligned: Alignment, config: Config) -> Tensor:
    """Compute the first GEMM, silu(gate) * up, as ``moe.gemm.up`` does with an alignment.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gates before ups.
        ids: [T, K].
        aligned: The alignment of ``ids``, with R positions.
        config: Configuration with the keys block_m, group and lead.

    Returns:
        [R, I]. Rows of padding are not written.
    """
    out = torch.empty(len(aligned.sorted_pairs), w13.shape[1] // 2, dtype=x.dtype, device=x.device)
    return _launch(x, w13, out, None, aligned, ids.numel(), ids.shape[1], ids.shape[1], config)


def down(
    h: Tensor, w2: Tensor, weights: Tensor, aligned: Alignment, config: Config, out: Tensor
) -> Tensor:
    """Compute the second GEMM as ``moe.gemm.down`` does, into ``out``.

    Args:
        h: The result of ``up``.
        w2: [E, H, I].
        weights: float32 [T, K].
        aligned: The alignment that ``up`` got.
        config: Configuration with the keys block_m, group and lead.
        out: [T, K', H]. K' < K if ``aligned`` leaves out the last K - K' experts of every token.
    """
    return _launch(
        h, w2, out, weights, aligned, weights.numel(), weights.shape[1], out.shape[1], config
    )
