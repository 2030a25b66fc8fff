"""Copies of cache tiles and queries to shared memory, for latent attention on Hopper, in Gluon.

The tensor memory accelerator (TMA) refills a ring of tiles of 64 keys: each buffer is refilled as
soon as its tile has been used, so that memory never waits for arithmetic. Tiles of an FP8 cache are
widened into one more buffer before they are multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from glowplug.kernels.launch import dependent_launch

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # name before and since Triton 3.7
TILE = gl.constexpr(64)  #: keys per tile


@gluon.jit
def fetch_tile(latent_at, rope_at, page, n0, latent, rope, ready, PAGE: gl.constexpr):
    """Start the TMA copies of the tile at position ``n0`` of a row, which is stored in ``page``."""
    slot = page * PAGE + n0 % PAGE
    mbarrier.expect(ready, latent_at.block_type.nbytes + rope_at.block_type.nbytes)
    copy_tile(latent_at, [slot, 0], ready, latent)
    copy_tile(rope_at, [slot, latent_at.block_type.shape[1]], ready, rope)


@gluon.jit
def fence_stores():
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
def take_tile(latent, rope, wide, wide_r, low, high, C: gl.constexpr, R: gl.constexpr):
    """Return the operands of the matrix instructions for a tile of keys that has arrived.

    They are the tile itself, or a copy of it in the queries' dtype if that is wider.
    """
    if latent.dtype == wide.dtype:
        if (low > 0) | (high < TILE):
            _copy(latent, latent, low, high, C)
            _copy(rope, rope, low, high, R)
            fence_stores()
        return latent, rope
    else:
        _copy(latent, wide, low, high, C)
        _copy(rope, wide_r, low, high, R)
        fence_stores()
        return wide, wide_r


@gluon.jit
def start_pipeline(
    latent_at,
    rope_at,
    table,
    start,
    tiles,
    known,
    dtype: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Allocate shared memory for the ring of tiles and start the first copies.

    Returns latents, rotary parts, their barriers, and a widened tile of ``dtype`` if the cache has
    another dtype.

    NOTE: lengths, pages and the first ``known`` keys are older than the step's first kernel, so
    they are loaded before the end of the prologue, which writes the other keys. This saves 0.8, 1.9
    and 0.4 us of 17, 25 and 50 us at 8, 32 and 128 rows.
    """
    latent = gl.allocate_shared_memory(latent_at.dtype, [STAGES, TILE, C], latent_at.layout)
    rope = gl.allocate_shared_memory(latent_at.dtype, [STAGES, TILE, R], rope_at.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_stores()
    for i in gl.static_range(STAGES):
        first = start + i * TILE
        if (i < tiles) & (first + TILE <= known):
            fetch_tile(
                latent_at,
                rope_at,
                gl.load(table + first // PAGE),
                first,
                latent.index(i),
                rope.index(i),
                ready.index(i),
                PAGE,
            )
    dependent_launch.wait(DEPENDENT)
    for i in gl.static_range(STAGES):
        first = start + i * TILE
        if (i < tiles) & (first + TILE > known):
            fetch_tile(
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
def load_queries(
    query,
    first,
    pairs,
    dtype: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Load BLOCK_M (query token, head) pairs to shared memory as [M, C] and [M, R].

    They are the pairs from ``first`` on of the ``pairs`` pairs of a row; ``query`` points at the
    row's first pair.
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
    fence_stores()
    return q_c, q_r
