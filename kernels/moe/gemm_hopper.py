"""Warp-specialised grouped GEMMs of routed experts on Hopper, in Gluon.

They compute what ``moe.gemm`` does over an ``Alignment`` of 128 or 192 rows a tile, for loads that
are limited by the tensor cores. Four warps load; two or three warpgroups multiply 64 rows of a tile
each, so that the epilogue of one (silu, routing weight, stores) overlaps the MMAs of another. The
kernel is persistent: a program computes one tile after another. 64 rows that are all padding are
not multiplied and, where rows are gathered, not loaded.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import Alignment

COLUMNS = 256  #: columns of a tile; half gates and half ups in the first GEMM
DEPTH = 64  #: depth of a pipeline stage
#: rows of a tile / 64 -> (pipeline stages, registers of a multiplying and of a loading thread)
RINGS = {2: (4, 216, 72), 3: (3, 160, 32)}

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
NAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def halves(ring, layout: gl.constexpr):
    """Return a view of a ring buffer [N, rows, depth] as half tiles [2 N, rows / 2, depth]."""
    shape: gl.constexpr = [2 * ring.shape[0], ring.shape[1] // 2, ring.shape[2]]
    if NAMED:
        return ring.reinterpret(ring.dtype, shape, layout)
    else:
        return ring._reinterpret(ring.dtype, shape, layout)


@gluon.jit
def place_of(tile, m_blocks, n_blocks, group):
    """Return (row block, column block) of a tile: down ``group`` row blocks, then right."""
    each = group * n_blocks
    first = tile // each * group
    height = gl.maximum(
        gl.minimum(m_blocks - first, group), 1
    )  # avoids a remainder by 0 beyond the last tile
    return first + tile % each % height, tile % each // height


@gluon.jit
def _rows_of(x, sorted_pairs, place, pairs, depth, TOPK: gl.constexpr, DEPTH: gl.constexpr):
    """Return pointers [64, DEPTH] to the tokens from ``place`` of the sorted list, and a mask."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
    pair = gl.load(sorted_pairs + place + gl.arange(0, 64, gl.SliceLayout(1, flat)))
    token = gl.where(pair < pairs, pair // TOPK, 0)
    column = gl.arange(0, DEPTH, gl.SliceLayout(0, flat))
    return x + token.to(gl.int64)[:, None] * depth + column[None, :], (pair < pairs)[:, None]


@gluon.jit
def _fetch(
    given,
    UP: gl.constexpr,
    GATHER: gl.constexpr,
    TOPK: gl.constexpr,
    PARTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    RING: gl.constexpr,
):
    """Load x and the expert's weight for every tile of this program.

    With ``GATHER`` the rows of x are gathered by the sorted list; otherwise they are contiguous.
    """
    (
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
        w_ring,
        full,
        empty,
    ) = given
    size: gl.constexpr = (COLUMNS + (0 if GATHER else 64 * PARTS)) * DEPTH * 2
    step = 0
    for tile in range(gl.program_id(0), m_blocks * n_blocks, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        expert = gl.load(expert_of_block + block)
        place = block * 64 * PARTS
        if GATHER:
            rows_0, real_0 = _rows_of(x, sorted_pairs, place, pairs, depth, TOPK, DEPTH)
            rows_1, real_1 = _rows_of(x, sorted_pairs, place + 64, pairs, depth, TOPK, DEPTH)
            if PARTS == 3:
                rows_2, real_2 = _rows_of(x, sorted_pairs, place + 128, pairs, depth, TOPK, DEPTH)
        first = expert * columns + column_block * COLUMNS
        second = first + COLUMNS // 2
        if UP:
            first = expert * 2 * columns + column_block * (COLUMNS // 2)
            second = first + columns
        for start in range(0, depth, DEPTH):
            stage = step % RING
            mbarrier.wait(empty.index(stage), ((step // RING) & 1) ^ 1)
            mbarrier.expect(full.index(stage), size)
            copy_tile(w_at, [first, start], full.index(stage), w_ring.index(2 * stage))
            copy_tile(w_at, [second, start], full.index(stage), w_ring.index(2 * stage + 1))
            if GATHER:
                copy_rows(x_ring.index(PARTS * stage), rows_0 + start, mask=real_0)
                copy_rows(x_ring.index(PARTS * stage + 1), rows_1 + start, mask=real_1)
                if PARTS == 3:
                    copy_rows(x_ring.index(PARTS * stage + 2), rows_2 + start, mask=real_2)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            else:
                for part in gl.static_range(PARTS):
                    copy_tile(
                        x_at,
                        [place + 64 * part, start],
                        full.index(stage),
                        x_ring.index(PARTS * stage + part),
                    )
            step += 1


@gluon.jit
def store_rows(out, value, row, real, first, columns):
    """Store value [M, N] in rows ``row`` of out [., columns] from column ``first`` on."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column = first + gl.arange(0, value.shape[1], gl.SliceLayout(0, flat))
    row = gl.convert_layout(row, gl.SliceLayout(1, flat))
    real = gl.convert_layout(real, gl.SliceLayout(1, flat))
    gl.store(
        out + row.to(gl.int64)[:, None] * columns + column[None, :],
        gl.convert_layout(value.to(out.dtype.element_ty), flat),
        mask=(real != 0)[:, None] & (column < columns)[None, :],
    )


@gluon.jit
def cut(value):
    """Split value [M, N] into its left and right half, [M, N / 2] each."""
    return value.reshape([value.shape[0], 2, value.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store_gated(out, gate, up, row, real, column_block, columns):
    """Store silu(gate) * up in rows ``row`` of out [., columns]."""
    store_rows(
        out, gate / (1.0 + gl.exp(-gate)) * up, row, real, column_block * gate.shape[1], columns
    )


@gluon.jit
def store_weighted(out, value, weights, pair, pairs, row, real, column_block, columns):
    """Store value times each pair's routing weight in rows ``row`` of out [., columns]."""
    value = value * gl.load(weights + pair, mask=pair < pairs, other=0.0)[:, None]
    low, high = cut(value)
    store_rows(out, low, row, real, column_block * value.shape[1], columns)
    store_rows(out, high, row, real, column_block * value.shape[1] + low.shape[1], columns)


@gluon.jit
def pass_over(full, empty, step, steps, RING: gl.constexpr):
    """Release the next ``steps`` pipeline stages unread. Return the step after them."""
    for _ in range(steps):
        mbarrier.wait(full.index(step % RING), (step // RING) & 1)
        mbarrier.arrive(empty.index(step % RING), count=1)
        step += 1
    return step


@gluon.jit
def _multiply(
    given,
    PART: gl.constexpr,
    UP: gl.constexpr,
    GATHER: gl.constexpr,
    TOPK: gl.constexpr,
    KEPT: gl.constexpr,
    PARTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    RING: gl.constexpr,
    LEAD: gl.constexpr,
):
    """Multiply rows 64 * PART to 64 * PART + 63 of every tile of this program."""
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
        [3, 0], [4, 1], [16, COLUMNS if PARTS == 2 else 128, 16]
    )
    side: gl.constexpr = gl.SliceLayout(1, acc_layout)
    step = 0
    steps = gl.cdiv(depth, DEPTH)
    tiles = m_blocks * n_blocks
    first = gl.program_id(0)
    block, column_block = place_of(first, m_blocks, n_blocks, group)
    leader = gl.load(sorted_pairs + (block * PARTS + PART) * 64, mask=first < tiles, other=pairs)
    if PART > 0:
        if LEAD > 0:
            if first < tiles:
                mbarrier.wait(turn, 0)
    for tile in range(first, tiles, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        place = (block * PARTS + PART) * 64 + gl.arange(0, 64, side)
        pair = gl.load(sorted_pairs + place)
        filled = leader < pairs
        after = tile + gl.num_programs(0)
        next_block, _ = place_of(after, m_blocks, n_blocks, group)
        leader = gl.load(
            sorted_pairs + (next_block * PARTS + PART) * 64, mask=after < tiles, other=pairs
        )
        if filled:
            acc = gl.zeros([64, COLUMNS], gl.float32, acc_layout)
            for k in range(steps):
                stage = step % RING
                mbarrier.wait(full.index(stage), (step // RING) & 1)
                if GATHER:
                    fence_async_shared()
                acc = warpgroup_mma(
                    x_ring.index(PARTS * stage + PART),
                    w_ring.index(stage).permute((1, 0)),
                    acc,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(1, deps=[acc])
                if k > 0:
                    mbarrier.arrive(empty.index((step + RING - 1) % RING), count=1)
                if PART == 0:
                    if step == LEAD - 1:
                        mbarrier.arrive(turn, count=1)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + RING - 1) % RING), count=1)
            real = (pair < pairs).to(gl.int32)
            if UP:
                gate, up = cut(acc)
                store_gated(out, gate, up, place, real, column_block, columns)
            else:
                row = pair
                if KEPT < TOPK:
                    row = pair // TOPK * KEPT + pair % TOPK
                store_weighted(out, acc, weights, pair, pairs, row, real, column_block, columns)
        else:
            step = pass_over(full, empty, step, steps, RING)


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
    PARTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    RING: gl.constexpr,
    LEAD: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute what ``moe.gemm._grouped`` does over sorted pairs.

    ``x_at`` and ``w_at`` are tiled descriptors of x and w. With ``GATHER`` x is gathered instead.
    The first warpgroup starts ``LEAD`` steps before the others, and stays ahead of them.
    """
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    dtype: gl.constexpr = out.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_ring = gl.allocate_shared_memory(dtype, [RING * PARTS, 64, DEPTH], shared)
    w_ring = gl.allocate_shared_memory(dtype, [RING, COLUMNS, DEPTH], shared)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=PARTS)
    mbarrier.init(turn, count=1)
    fence_async_shared()
    m_blocks = gl.load(num_padded) // (64 * PARTS)
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
    if PARTS == 2:
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
                        PARTS,
                        COLUMNS,
                        DEPTH,
                        RING,
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
                        PARTS,
                        COLUMNS,
                        DEPTH,
                        RING,
                        LEAD,
                    ),
                ),
                (_fetch, (fetched, UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
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
                        PARTS,
                        COLUMNS,
                        DEPTH,
                        RING,
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
                        PARTS,
                        COLUMNS,
                        DEPTH,
                        RING,
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
                        PARTS,
                        COLUMNS,
                        DEPTH,
                        RING,
                        LEAD,
                    ),
                ),
                (_fetch, (fetched, UP, GATHER, TOPK, PARTS, COLUMNS, DEPTH, RING)),
            ],
            [4, 4, 4],
            [MULTIPLYING, MULTIPLYING, FETCHING],
        )


def supported() -> bool:
    """Return whether the card is a Hopper: later cards have no warpgroup MMA (wgmma)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiled(value: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of ``value`` in tiles of ``rows`` x ``DEPTH``."""
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
    """Launch one grouped GEMM into ``out``; without ``weights`` the first."""
    columns = out.shape[-1]
    depth = w.shape[2]
    width = COLUMNS // (2 if weights is None else 1)
    assert depth % DEPTH == 0 and columns % 8 == 0 and x.element_size() == 2, (
        "these sizes do not fit the kernel's tiles"
    )
    n_blocks = -(-columns // width)
    parts = config["block_m"] // 64
    ring, multiplying, fetching = RINGS[parts]
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
        PARTS=parts,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        RING=ring,
        LEAD=min(config["lead"], depth // DEPTH),
        MULTIPLYING=multiplying,
        FETCHING=fetching,
        num_warps=4,
        **dependent.options(),
    )
    return out


def up(x: Tensor, w13: Tensor, ids: Tensor, aligned: Alignment, config: Config) -> Tensor:
    """Compute the first GEMM as ``moe.gemm.up`` does for ``aligned``.

    ``config`` holds block_m, group and lead.
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
        config: block_m, group and lead.
        out: [T, K', H]. K' < K if ``aligned`` leaves out the last K - K' experts of every token.
    """
    return _launch(
        h, w2, out, weights, aligned, weights.numel(), weights.shape[1], out.shape[1], config
    )
