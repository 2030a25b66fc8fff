"""Grouped GEMMs of routed experts: each token's row times the weight of its expert, in float32.

Weights have the layout of checkpoints, [E, rows, K]. The epilogue of the first GEMM is silu(gate) *
up, that of the second multiplies by the routing weight. A tile gets its rows in one of two ways.
"sorted" walks over an ``Alignment``. "dense" gives every expert a tile of all tokens and stores
only the tokens that chose it; this saves the alignment for few tokens. Fused shared experts have
larger tiles of their own: both GEMMs are limited by the L2 bandwidth, and a weight is read once for
every tile that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.moe.align import Alignment
from glowplug.kernels.moe.gemm_tile import (
    await_ready,
    compute_tile,
    fused_shared_tile,
    tile_pairs,
    tile_place,
)
from glowplug.kernels.moe.tiles import SHARED_TILE_TOKENS_MAX

#: largest BLOCK_M for which padding rows are masked. Most rows of such tiles are padding, and
#: reading them from L2 would take bandwidth from the weights.
MASKED_TILE_ROWS_MAX = 32
#: one GEMM's configuration, with the keys of ``moe.tiles.tile``
Config = Mapping[str, Any]


class Early(NamedTuple):
    """Buffers that let the fused shared experts start before the gate has chosen the routed ones.

    Attributes:
        ready: int32 [2], zeros before and after the step: the ready flag that ``route`` sets when x
            is available, and the number of programs that have seen the flag.
        out: The output of ``up``. NOTE: allocated before the gate is launched. Otherwise it could
            get memory that the gate has released on the host but still uses on the device.
    """

    ready: Tensor
    out: Tensor


@triton.jit(
    do_not_specialize=[
        "pairs",
        "experts",
        "m_blocks",
        "n_blocks",
        "group",
        "shared_programs",
        "tokens",
    ]
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
    ready,
    pairs,
    experts,
    columns,
    depth,
    m_blocks,
    n_blocks,
    group,
    shared_programs,
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
    FUSED_SHARED: tl.constexpr,
    SHARED_M: tl.constexpr,
    SHARED_N: tl.constexpr,
    SHARED_K: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of a grouped GEMM.

    ``UP`` is the first GEMM: x holds tokens [T, depth], w gates before ups, and ``out`` has one row
    for each position of the sorted list (or for each pair). Otherwise x holds those rows, and
    ``out`` has one row for each pair: [T * K, columns].

    ``stored`` and ``x_stored`` are w and x as pointers. The first ``shared_programs`` programs
    compute the fused shared experts, which the sorted list leaves out. With ``EARLY`` those of the
    first GEMM run while the gate still chooses, as soon as the ready flag ``ready`` is set for x.
    """
    if EARLY:
        if tl.program_id(0) < shared_programs:
            await_ready(ready, shared_programs, DEPENDENT)
            dependent_launch.begin(DEPENDENT)
            fused_shared_tile(
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
                FUSED_SHARED,
                TOPK,
                EVEN_K,
                SHARED_M,
                SHARED_N,
                SHARED_K,
            )
            return
    if UP:
        dependent_launch.wait(DEPENDENT)
    dependent_launch.begin(
        DEPENDENT
    )  # the second GEMM may read the inputs that the first waited for
    if FUSED_SHARED > 0 and not EARLY:
        if tl.program_id(0) < shared_programs:
            if not UP:
                dependent_launch.wait(DEPENDENT)
            fused_shared_tile(
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
                FUSED_SHARED,
                TOPK,
                EVEN_K,
                SHARED_M,
                SHARED_N,
                SHARED_K,
            )
            return
    block, column_block = tile_place(m_blocks, n_blocks, group, shared_programs)
    expert, pair = tile_pairs(
        ids,
        sorted_pairs,
        expert_of_block,
        block,
        pairs,
        experts - FUSED_SHARED,
        SORTED,
        TOPK,
        WIDTH,
        BLOCK_M,
    )
    if not UP:
        dependent_launch.wait(DEPENDENT)
    if expert < 0:
        return
    real = pair < pairs
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.where(
        real, pair, 0
    )  # padding rows that are not masked read row 0; their results are not stored
    target = pair
    if UP:
        row = row // TOPK
        if SORTED:
            target = place
    elif SORTED:
        row = place
    compute_tile(
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


def fused_shared_tile_sizes(tokens: int, up: bool, config: Config) -> tuple[int, int, int]:
    """Return the rows, columns and depth of a fused shared expert's tile.

    All tokens share one tile if they fit into ``SHARED_TILE_TOKENS_MAX`` rows. ``config`` is the
    GEMM's configuration; ``up``: it is the first GEMM.
    """
    columns = config.get("wide") or (64 if up or config["warps"] < 8 else 128)
    rows = min(SHARED_TILE_TOKENS_MAX, max(16, next_power_of_2(tokens)))
    return rows, columns, 64


def _row_blocks(
    ids: Tensor, experts: int, aligned: Alignment | None, block_m: int
) -> tuple[int, tuple[Tensor, Tensor] | tuple[None, None]]:
    """Return the number of row blocks, and the lists with the pairs and the expert of each.

    Without an alignment every one of ``experts`` experts has the blocks of all tokens, and there
    are no lists.
    """
    if aligned is None:
        return experts * cdiv(ids.shape[0], block_m), (None, None)
    return len(aligned.expert_of_block), (aligned.sorted_pairs, aligned.expert_of_block)


def _launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    aligned: Alignment | None,
    config: Config,
    fused_shared: int = 0,
    ready: Tensor | None = None,
) -> Tensor:
    """Launch the second grouped GEMM, or the first if ``weights`` is None; return ``out``."""
    pairs = ids.numel()
    (experts, _, depth) = w.shape
    columns = out.shape[1]
    block_m = config["block_m"]
    block_n = config["block_n"]
    block_k = config["block_k"]
    m_blocks, tile_lists = _row_blocks(ids, experts - fused_shared, aligned, block_m)
    n_blocks = cdiv(columns, block_n)
    tma = bool(config.get("tma")) and depth * w.element_size() % 16 == 0
    x_tma = tma and aligned is not None and weights is not None
    shared_m, shared_n, shared_k = (
        fused_shared_tile_sizes(ids.shape[0], weights is None, config)
        if fused_shared
        else (16, 16, 16)
    )
    shared_programs = fused_shared * cdiv(ids.shape[0], shared_m) * cdiv(columns, shared_n)
    _grouped[(shared_programs + m_blocks * n_blocks,)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]) if x_tma else x,
        x,
        TensorDescriptor.from_tensor(w.view(-1, depth), [block_n, block_k]) if tma else w,
        w,
        out,
        ids,
        weights,
        *tile_lists,
        ids if ready is None else ready,
        pairs,
        experts,
        columns,
        depth,
        m_blocks,
        n_blocks,
        config.get("group", 64),
        shared_programs,
        ids.shape[0],
        UP=weights is None,
        SORTED=aligned is not None,
        TOPK=ids.shape[1],
        WIDTH=next_power_of_2(ids.shape[1]),
        TMA=tma,
        X_TMA=x_tma,
        SWAP=bool(config.get("swap")),
        EVEN_K=depth % block_k == 0 == depth % shared_k,
        MASK=block_m <= MASKED_TILE_ROWS_MAX and not x_tma,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        FUSED_SHARED=fused_shared,
        SHARED_M=shared_m,
        SHARED_N=shared_n,
        SHARED_K=shared_k,
        EARLY=ready is not None,
        num_warps=config["warps"],
        num_stages=config["stages"],
        **dependent_launch.options(),
    )
    return out


def up(
    x: Tensor,
    w13: Tensor,
    ids: Tensor,
    aligned: Alignment | None,
    config: Config,
    fused_shared: int = 0,
    early: Early | None = None,
) -> Tensor:
    """Compute the first GEMM, silu(gate) * up.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gates before ups.
        ids: [T, K].
        aligned: An alignment made with the configuration's block_m; None ("dense"): one row per
            pair.
        config: The tile configuration.
        fused_shared: Number of fused shared experts. They are the last experts, every token's last
            ones, and not in ``aligned``.
        early: If given, the fused shared experts do not wait for the ids. Only allowed directly
            after the gate that got ``early.ready`` for the same x.

    Returns:
        [R + shared * T, I]: a row for each position in ``aligned`` (or each pair), then T rows for
        each fused shared expert. Rows of padding and of experts of other ranks are not written.
        Without ``aligned`` the first R rows include rows for the fused shared experts' pairs, which
        are not written either.
    """
    if early is not None:
        return _launch(x, w13, early.out, ids, None, aligned, config, fused_shared, early.ready)
    rows = (
        ids.numel() if aligned is None else len(aligned.sorted_pairs)
    ) + fused_shared * ids.shape[0]
    out = torch.empty(rows, w13.shape[1] // 2, dtype=x.dtype, device=x.device)
    return _launch(x, w13, out, ids, None, aligned, config, fused_shared)


def down(
    h: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    aligned: Alignment | None,
    config: Config,
    fused_shared: int = 0,
) -> Tensor:
    """Compute the second GEMM, times the routing weights.

    The launch must directly follow that of ``up``: it reads the ids and the alignment while ``up``
    still runs.

    Args:
        h: The result of ``up`` with the same ``aligned`` and ``fused_shared``.
        w2: [E, H, I].
        ids: [T, K].
        weights: float32 [T, K].
        aligned: See ``up``.
        config: The tile configuration.
        fused_shared: See ``up``.

    Returns:
        [T * K, H], one row per pair. Rows of experts of other ranks are not written.
    """
    out = torch.empty(ids.numel(), w2.shape[1], dtype=h.dtype, device=h.device)
    return _launch(h, w2, out, ids, weights, aligned, config, fused_shared)
