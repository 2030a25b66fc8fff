"""Device functions of the warp-specialised grouped GEMM on Hopper, in Gluon.

They order tiles, load them, pass over pipeline stages, and compute the epilogue. The FP8 GEMM of
``moe.fp8.gemm_hopper`` uses all of them but the loads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

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
    """Return (row block, column block) of ``tile``: down ``group`` row blocks, then right."""
    each = group * n_blocks
    first = tile // each * group
    height = gl.maximum(
        gl.minimum(m_blocks - first, group), 1
    )  # avoids a remainder by 0 beyond the last tile
    return first + tile % each % height, tile % each // height


@gluon.jit
def _rows_of(x, sorted_pairs, place, pairs, depth, TOPK: gl.constexpr, DEPTH: gl.constexpr):
    """Return pointers [64, DEPTH] to the tokens of the pairs from ``place`` on, and their mask."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
    pair = gl.load(sorted_pairs + place + gl.arange(0, 64, gl.SliceLayout(1, flat)))
    token = gl.where(pair < pairs, pair // TOPK, 0)
    column = gl.arange(0, DEPTH, gl.SliceLayout(0, flat))
    return x + token.to(gl.int64)[:, None] * depth + column[None, :], (pair < pairs)[:, None]


@gluon.jit
def load_tiles(
    given,
    UP: gl.constexpr,
    GATHER: gl.constexpr,
    TOPK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
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
    size: gl.constexpr = (COLUMNS + (0 if GATHER else 64 * WARPGROUPS)) * DEPTH * 2
    step = 0
    for tile in range(gl.program_id(0), m_blocks * n_blocks, gl.num_programs(0)):
        block, column_block = place_of(tile, m_blocks, n_blocks, group)
        expert = gl.load(expert_of_block + block)
        place = block * 64 * WARPGROUPS
        if GATHER:
            rows_0, real_0 = _rows_of(x, sorted_pairs, place, pairs, depth, TOPK, DEPTH)
            rows_1, real_1 = _rows_of(x, sorted_pairs, place + 64, pairs, depth, TOPK, DEPTH)
            if WARPGROUPS == 3:
                rows_2, real_2 = _rows_of(x, sorted_pairs, place + 128, pairs, depth, TOPK, DEPTH)
        first = expert * columns + column_block * COLUMNS
        second = first + COLUMNS // 2
        if UP:
            first = expert * 2 * columns + column_block * (COLUMNS // 2)
            second = first + columns
        for start in range(0, depth, DEPTH):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), size)
            copy_tile(w_at, [first, start], full.index(stage), w_ring.index(2 * stage))
            copy_tile(w_at, [second, start], full.index(stage), w_ring.index(2 * stage + 1))
            if GATHER:
                copy_rows(x_ring.index(WARPGROUPS * stage), rows_0 + start, mask=real_0)
                copy_rows(x_ring.index(WARPGROUPS * stage + 1), rows_1 + start, mask=real_1)
                if WARPGROUPS == 3:
                    copy_rows(x_ring.index(WARPGROUPS * stage + 2), rows_2 + start, mask=real_2)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            else:
                for warpgroup in gl.static_range(WARPGROUPS):
                    copy_tile(
                        x_at,
                        [place + 64 * warpgroup, start],
                        full.index(stage),
                        x_ring.index(WARPGROUPS * stage + warpgroup),
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
def split_columns(value):
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
    low, high = split_columns(value)
    store_rows(out, low, row, real, column_block * value.shape[1], columns)
    store_rows(out, high, row, real, column_block * value.shape[1] + low.shape[1], columns)


@gluon.jit
def pass_over(full, empty, step, steps, STAGES: gl.constexpr):
    """Release the next ``steps`` pipeline stages unread, and return the step after them."""
    for _ in range(steps):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        mbarrier.arrive(empty.index(step % STAGES), count=1)
        step += 1
    return step
