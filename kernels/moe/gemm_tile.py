"""Device functions of grouped GEMMs: the place, the pairs and the result of one tile."""

from __future__ import annotations

import triton
import triton.language as tl

from glowplug.kernels.launch import dependent_launch

#: reads of the gate's ready flag before a program gives up polling; about ten are enough
POLLS_AT_MOST: tl.constexpr = tl.constexpr(4096)


@triton.jit
def tile_place(m_blocks, n_blocks, group, before=0):
    """Return the (row block, column block) of this program's tile.

    The first ``before`` programs compute other tiles. Tiles are grouped as in a swizzle: down
    ``group`` row blocks, then on to the next column block.
    """
    program = tl.program_id(0) - before
    each = group * n_blocks
    first = program // each * group
    height = tl.minimum(m_blocks - first, group)
    return first + program % each % height, program % each // height


@triton.jit
def chosen_pairs(
    ids, expert, first_token, pairs, TOPK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return each token's pair with ``expert``, or ``pairs`` if it has none: int32 [BLOCK_M].

    The tokens are the BLOCK_M from ``first_token`` on. A token has at most one pair with an expert.
    """
    token = first_token + tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    pair = token[:, None] * TOPK + k[None, :]
    inside = (pair < pairs) & (k[None, :] < TOPK)
    chosen = tl.load(ids + pair, mask=inside, other=-1).to(tl.int32)
    return tl.min(tl.where(inside & (chosen == expert), pair, pairs), 1)


@triton.jit
def tile_pairs(
    ids,
    sorted_pairs,
    expert_of_block,
    block,
    pairs,
    experts,
    SORTED: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return (expert, pairs int32 [BLOCK_M]) of a tile. The expert is -1 if the tile is empty.

    Without ``SORTED`` tiles are in descending order of experts.
    """
    if SORTED:
        expert = tl.load(expert_of_block + block)
        chosen = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        tiles = tl.cdiv(pairs, TOPK * BLOCK_M)
        expert = experts - 1 - block // tiles
        chosen = chosen_pairs(ids, expert, block % tiles * BLOCK_M, pairs, TOPK, WIDTH, BLOCK_M)
        expert = tl.where(tl.min(chosen, 0) < pairs, expert, -1)
    return expert, chosen


@triton.jit
def _load_weight(
    w,
    expert,
    row,
    rows,
    first_k,
    depth,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load rows [row, row + BLOCK_N) of an expert's weight.

    Rows beyond the expert's end have undefined values.
    """
    if TMA:
        value = w.load([expert * rows + row, first_k])
    else:
        k = first_k + tl.arange(0, BLOCK_K)
        n = row + tl.arange(0, BLOCK_N)
        at = (
            w
            + expert.to(tl.int64) * rows * depth
            + tl.where(n < rows, n, 0)[:, None] * depth
            + k[None, :]
        )
        if EVEN_K:
            value = tl.load(at)
        else:
            value = tl.load(at, mask=k[None, :] < depth, other=0.0)
    return value


@triton.jit
def _times(x, w, total, SWAP: tl.constexpr):
    """Return total + x w^T, with ``SWAP`` total + w x^T."""
    if SWAP:
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def _rows(x, row, k, depth, start, real, EVEN_K: tl.constexpr, MASK: tl.constexpr):
    """Load x[row, start + k].

    Rows that are not ``real`` have undefined values; with ``MASK`` they are zeros and not read.
    """
    at = x + row.to(tl.int64)[:, None] * depth + start + k[None, :]
    if MASK:
        value = tl.load(at, mask=real[:, None] & (k[None, :] < depth - start), other=0.0)
    elif EVEN_K:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=k[None, :] < depth - start, other=0.0)
    return value


@triton.jit
def compute_tile(
    x,
    first_row,
    w,
    out,
    weights,
    expert,
    row,
    pair,
    real,
    target,
    first,
    columns,
    depth,
    UP: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows ``row`` of x by an expert's weight rows from ``first`` on.

    The result, with its epilogue, is stored in rows ``target`` of ``out`` where they are real.
    """
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        if X_TMA:
            value = x.load([first_row, start])
        else:
            value = _rows(x, row, tl.arange(0, BLOCK_K), depth, start, real, EVEN_K, MASK)
        if UP:
            total = _times(
                value,
                _load_weight(
                    w, expert, first, 2 * columns, start, depth, TMA, EVEN_K, BLOCK_N, BLOCK_K
                ),
                total,
                SWAP,
            )
            up = _times(
                value,
                _load_weight(
                    w,
                    expert,
                    columns + first,
                    2 * columns,
                    start,
                    depth,
                    TMA,
                    EVEN_K,
                    BLOCK_N,
                    BLOCK_K,
                ),
                up,
                SWAP,
            )
        else:
            total = _times(
                value,
                _load_weight(
                    w, expert, first, columns, start, depth, TMA, EVEN_K, BLOCK_N, BLOCK_K
                ),
                total,
                SWAP,
            )
    if UP:
        total = total / (1.0 + tl.exp(-total)) * up
    if SWAP:
        total = tl.trans(total)
    if not UP:
        total = total * tl.load(weights + pair, mask=real, other=0.0)[:, None]
    n = first + tl.arange(0, BLOCK_N)
    tl.store(
        out + target.to(tl.int64)[:, None] * columns + n[None, :],
        total.to(out.dtype.element_ty),
        mask=real[:, None] & (n[None, :] < columns),
    )


@triton.jit
def fused_shared_tile(
    program,
    x,
    w,
    out,
    weights,
    experts,
    columns,
    depth,
    tokens,
    places,
    UP: tl.constexpr,
    FUSED_SHARED: tl.constexpr,
    TOPK: tl.constexpr,
    EVEN_K: tl.constexpr,
    SHARED_M: tl.constexpr,
    SHARED_N: tl.constexpr,
    SHARED_K: tl.constexpr,
):
    """Compute a tile of one of the ``FUSED_SHARED`` fused shared experts.

    Their ids are the highest, and the last of every token. Their rows between the two GEMMs are
    stored after the first ``places`` rows.
    """
    tiles = tl.cdiv(tokens, SHARED_M)
    number, first = program // tiles % FUSED_SHARED, program // tiles // FUSED_SHARED * SHARED_N
    token = program % tiles * SHARED_M + tl.arange(0, SHARED_M)
    real = token < tokens
    pair, place = token * TOPK + TOPK - FUSED_SHARED + number, places + number * tokens + token
    compute_tile(
        x,
        0,
        w,
        out,
        weights,
        experts - FUSED_SHARED + number,
        tl.where(real, token if UP else place, 0),
        pair,
        real,
        place if UP else pair,
        first,
        columns,
        depth,
        UP,
        False,
        False,
        True,
        EVEN_K,
        False,
        SHARED_M,
        SHARED_N,
        SHARED_K,
    )


@triton.jit
def await_ready(ready, programs, DEPENDENT: tl.constexpr):
    """Wait until the gate has set the ready flag ``ready``: x may be read from then on.

    After ``POLLS_AT_MOST`` reads of the flag, wait for the preceding kernels instead. The last of
    ``programs`` programs clears the flag.
    """
    looks = 0
    while (looks < POLLS_AT_MOST) & (tl.atomic_add(ready, 0, sem="acquire") == 0):
        looks += 1
    if looks == POLLS_AT_MOST:
        dependent_launch.wait(DEPENDENT)
    if tl.atomic_add(ready + 1, 1, sem="relaxed") == programs - 1:
        tl.atomic_xchg(ready + 1, 0, sem="relaxed")
        tl.atomic_xchg(ready, 0, sem="relaxed")
