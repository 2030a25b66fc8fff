"""Grouped products of routed experts: rows of many tokens, each times its own expert's weight,
accumulated in float32.

Weights lie as checkpoints have them, [E, rows, K]. The first product ends in silu(gate) * up, the
second in the routing weight. Two ways to a tile's rows: "sorted" walks over an ``Alignment``;
"dense" gives every expert a tile of all tokens and stores only those that chose it, which for few
tokens spares the alignment. Experts that every token chose have wider tiles of their own, because
what limits both products is how fast rows come from L2: a weight that several tiles want comes
several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.moe.align import Alignment
from glowplug.kernels.moe.tiles import WIDE

POLLS_AT_MOST: tl.constexpr = tl.constexpr(
    4096
)  # looks for the gate's sign; it comes within some ten
#: rows of a tile up to which most are padding, which is not read: its way from L2 takes time from
#: weights'
SPARSE = 32
Config = Mapping[
    str, Any
]  #: of one product: block_m, block_n, block_k, group, warps, stages, swap, tma, way, wide


class Early(NamedTuple):
    """What lets everybody's experts begin before the gate has chosen.

    Attributes:
        begun: int32 [2], zeros before and after: ``route``'s sign that x is there, and how many
            have seen it.
        out: what ``up`` fills. NOTE: made before the gate is launched, because memory that the gate
            gives back must not become a result that is written while the gate still runs.
    """

    begun: Tensor
    out: Tensor


@triton.jit
def tile_place(m_blocks, n_blocks, group, before=0):
    """The tile of this program, ``before`` other ones: down ``group`` tiles of rows, then on to the
    next columns.
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
    """Of the tokens from ``first_token`` on: each one's pair with ``expert``, or ``pairs``. A token
    has one at most.
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
    """(expert, pairs int32 [BLOCK_M]) of a tile; the expert is -1 where there is nothing to do.

    Unless ``SORTED``, experts come from last to first.
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
    """Rows [row, row + BLOCK_N) of an expert's weight; past its end whatever is there."""
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
    if SWAP:
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def _rows(x, row, k, depth, start, real, EVEN_K: tl.constexpr, MASK: tl.constexpr):
    """x[row, start + k]; rows that are not ``real`` are whatever is there, or with ``MASK`` not
    read.
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
def _tile(
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
    """Rows ``row`` of x times an expert's rows from ``first`` on, into rows ``target`` of out where
    they are real.
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
def _everybodys(
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
    SHARED: tl.constexpr,
    TOPK: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE_M: tl.constexpr,
    WIDE_N: tl.constexpr,
    WIDE_K: tl.constexpr,
):
    """A tile of one of the ``SHARED`` last experts, which every token chose last; their rows lie
    behind ``places``.
    """
    tiles = tl.cdiv(tokens, WIDE_M)
    shared, first = program // tiles % SHARED, program // tiles // SHARED * WIDE_N
    token = program % tiles * WIDE_M + tl.arange(0, WIDE_M)
    real = token < tokens
    pair, place = token * TOPK + TOPK - SHARED + shared, places + shared * tokens + token
    _tile(
        x,
        0,
        w,
        out,
        weights,
        experts - SHARED + shared,
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
        WIDE_M,
        WIDE_N,
        WIDE_K,
    )


@triton.jit
def _await(begun, programs, DEPENDENT: tl.constexpr):
    """Wait until the gate has seen x, the earliest moment to read it; the last of ``programs``
    takes the sign back.
    """
    looks = 0
    while (looks < POLLS_AT_MOST) & (tl.atomic_add(begun, 0, sem="acquire") == 0):
        looks += 1
    if looks == POLLS_AT_MOST:
        dependent.wait(DEPENDENT)
    if tl.atomic_add(begun + 1, 1, sem="relaxed") == programs - 1:
        tl.atomic_xchg(begun + 1, 0, sem="relaxed")
        tl.atomic_xchg(begun, 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["pairs", "experts", "m_blocks", "n_blocks", "group", "wide", "tokens"]
)
def _grouped(
    x,
    x_stored,
    w,
    stored,
    out,
    ids,
    weights,
    sorted_pairs,
    expert_of_block,
    begun,
    pairs,
    experts,
    columns,
    depth,
    m_blocks,
    n_blocks,
    group,
    wide,
    tokens,
    UP: tl.constexpr,
    SORTED: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE_M: tl.constexpr,
    WIDE_N: tl.constexpr,
    WIDE_K: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``UP``: x are tokens [T, K], w holds gates, then ups; out has a row a place in the sorted
    list, or a pair.

    Otherwise x are those rows, and out has a row a pair: [T * K, columns]. ``stored`` and
    ``x_stored``: w and x as pointers. The first ``wide`` programs are for everybody's experts,
    which the list leaves out; with ``EARLY`` those of the first product run while the gate still
    chooses, as soon as ``begun`` says that x is there.
    """
    if EARLY:
        if tl.program_id(0) < wide:
            _await(begun, wide, DEPENDENT)
            dependent.begin(DEPENDENT)
            _everybodys(
                tl.program_id(0),
                x_stored,
                stored,
                out,
                weights,
                experts,
                columns,
                depth,
                tokens,
                m_blocks * BLOCK_M if SORTED else pairs,
                UP,
                SHARED,
                TOPK,
                EVEN_K,
                WIDE_M,
                WIDE_N,
                WIDE_K,
            )
            return
    if UP:
        dependent.wait(DEPENDENT)
    dependent.begin(DEPENDENT)  # the second product may read what the first has waited for
    if SHARED > 0 and not EARLY:
        if tl.program_id(0) < wide:
            if not UP:
                dependent.wait(DEPENDENT)
            _everybodys(
                tl.program_id(0),
                x_stored,
                stored,
                out,
                weights,
                experts,
                columns,
                depth,
                tokens,
                m_blocks * BLOCK_M if SORTED else pairs,
                UP,
                SHARED,
                TOPK,
                EVEN_K,
                WIDE_M,
                WIDE_N,
                WIDE_K,
            )
            return
    block, column_block = tile_place(m_blocks, n_blocks, group, wide)
    expert, pair = tile_pairs(
        ids,
        sorted_pairs,
        expert_of_block,
        block,
        pairs,
        experts - SHARED,
        SORTED,
        TOPK,
        WIDTH,
        BLOCK_M,
    )
    if not UP:
        dependent.wait(DEPENDENT)
    if expert < 0:
        return
    real = pair < pairs
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.where(
        real, pair, 0
    )  # padding that is not masked multiplies row 0; its products are not stored
    target = pair
    if UP:
        row = row // TOPK
        if SORTED:
            target = place
    elif SORTED:
        row = place
    _tile(
        x,
        block * BLOCK_M,
        w,
        out,
        weights,
        expert,
        row,
        pair,
        real,
        target,
        column_block * BLOCK_N,
        columns,
        depth,
        UP,
        TMA,
        X_TMA,
        SWAP,
        EVEN_K,
        MASK,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


def wide_tile(tokens: int, up: bool, config: Config) -> tuple[int, int, int]:
    """Rows, columns and depth of a tile of everybody's experts, whose tokens share one where they
    fit.
    """
    columns = config.get("wide") or (64 if up or config["warps"] < 8 else 128)
    return min(WIDE, max(16, next_power_of_2(tokens))), columns, 64


def _launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    aligned: Alignment | None,
    config: Config,
    shared: int = 0,
    begun: Tensor | None = None,
) -> Tensor:
    pairs = ids.numel()
    (experts, _, depth) = w.shape
    columns = out.shape[1]
    block_m = config["block_m"]
    block_n = config["block_n"]
    block_k = config["block_k"]
    dense = aligned is None
    m_blocks = (
        (experts - shared) * cdiv(ids.shape[0], block_m) if dense else len(aligned.expert_of_block)
    )
    n_blocks = cdiv(columns, block_n)
    tma = bool(config.get("tma")) and depth * w.element_size() % 16 == 0
    x_tma = tma and not dense and weights is not None
    places = (None, None) if dense else (aligned.sorted_pairs, aligned.expert_of_block)
    wide_m, wide_n, wide_k = (
        wide_tile(ids.shape[0], weights is None, config) if shared else (16, 16, 16)
    )
    wide = shared * cdiv(ids.shape[0], wide_m) * cdiv(columns, wide_n)
    _grouped[(wide + m_blocks * n_blocks,)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]) if x_tma else x,
        x,
        TensorDescriptor.from_tensor(w.view(-1, depth), [block_n, block_k]) if tma else w,
        w,
        out,
        ids,
        weights,
        *places,
        ids if begun is None else begun,
        pairs,
        experts,
        columns,
        depth,
        m_blocks,
        n_blocks,
        config.get("group", 64),
        wide,
        ids.shape[0],
        UP=weights is None,
        SORTED=not dense,
        TOPK=ids.shape[1],
        WIDTH=next_power_of_2(ids.shape[1]),
        TMA=tma,
        X_TMA=x_tma,
        SWAP=bool(config.get("swap")),
        EVEN_K=depth % block_k == 0 == depth % wide_k,
        MASK=block_m <= SPARSE and not x_tma,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SHARED=shared,
        WIDE_M=wide_m,
        WIDE_N=wide_n,
        WIDE_K=wide_k,
        EARLY=begun is not None,
        num_warps=config["warps"],
        num_stages=config["stages"],
        **dependent.options(),
    )
    return out


def up(
    x: Tensor,
    w13: Tensor,
    ids: Tensor,
    aligned: Alignment | None,
    config: Config,
    shared: int = 0,
    early: Early | None = None,
) -> Tensor:
    """x [T, H], w13 [E, 2I, H] gates before ups, ids [T, K] -> silu(gate) * up, I columns.

    A row a place in ``aligned``, which was made with the configuration's block_m; without one
    ("dense") a row a pair. Rows of padding and of absent experts are not written. ``shared``: so
    many last experts are every token's last ones and not in ``aligned``; T rows for each of them
    follow, and without ``aligned`` their pairs' are not written. With
    ``early`` these do not wait for the ids: only right behind the gate that was given
    ``early.begun`` for the same x.
    """
    if early is not None:
        return _launch(x, w13, early.out, ids, None, aligned, config, shared, early.begun)
    rows = (ids.numel() if aligned is None else len(aligned.sorted_pairs)) + shared * ids.shape[0]
    out = torch.empty(rows, w13.shape[1] // 2, dtype=x.dtype, device=x.device)
    return _launch(x, w13, out, ids, None, aligned, config, shared)


def down(
    h: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    aligned: Alignment | None,
    config: Config,
    shared: int = 0,
) -> Tensor:
    """h of ``up`` with its ``aligned`` and ``shared``, w2 [E, H, I], weights float32 [T, K] -> [T *
    K, H], weighted.

    It may only follow ``up``: it reads ids and lists while that still runs. Rows of absent experts
    are not written.
    """
    out = torch.empty(ids.numel(), w2.shape[1], dtype=h.dtype, device=h.device)
    return _launch(h, w2, out, ids, weights, aligned, config, shared)
