"""Grouped GEMMs of routed experts in int8, weights scaled by row and activations by token or pair.

w13 is int8 [E, 2I, H] (gate then up) with scales float32 [E, 2I], w2 int8 [E, H, I] with scales
[E, H]. Pair t * K + k is token t's k-th expert; rows between the GEMMs are stored by pair. A row's
scale depends on all its channels, so a separate kernel quantises the activations between the GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats import int8_triton
from glowplug.kernels.gemm.int8 import DTYPE, load_tile, times, zeros_of
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.gemm_tile import tile_pairs, tile_place
from glowplug.kernels.moe.narrow.tiles import DENSE_TOKENS_MAX, narrow_experts_config
from glowplug.kernels.moe.sum import moe_sum


@triton.jit
def _scaled(total, x_scale, w_scale, SWAP: tl.constexpr):
    """Scale int32 sums: float32 [M, N]."""
    if SWAP:
        total = tl.trans(total)
    return total.to(tl.float32) * x_scale[:, None] * w_scale[None, :]


@triton.jit(do_not_specialize=["pairs", "experts", "m_blocks", "n_blocks", "group"])
def _grouped(
    x,
    x_scales,
    w,
    w_scales,
    out,
    ids,
    weights,
    sorted_pairs,
    expert_of_block,
    pairs,
    experts,
    columns,
    depth,
    m_blocks,
    n_blocks,
    group,
    UP: tl.constexpr,
    SORTED: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of a grouped GEMM.

    With ``UP`` x has a row per token, w has gates before ups, and out[pair] = silu(gate) * up for
    each (token, expert) pair. Otherwise x has a row per pair, and the results are multiplied by the
    routing weights.
    """
    dependent_launch.begin(DEPENDENT)
    block, column_block = tile_place(m_blocks, n_blocks, group)
    dependent_launch.wait(DEPENDENT)
    expert, pair = tile_pairs(
        ids, sorted_pairs, expert_of_block, block, pairs, experts, SORTED, TOPK, WIDTH, BLOCK_M
    )
    if expert < 0:
        return
    real = pair < pairs
    row = tl.where(real, pair, 0)  # padding rows read row 0, which is cheaper than a mask
    if UP:
        row = row // TOPK
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    held = tl.where(inside, n, 0)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * depth + k[None, :]
    w_row = expert.to(tl.int64) * columns * (2 if UP else 1) + held
    w_at = w + w_row[:, None] * depth + k[None, :]
    x_scale = tl.load(x_scales + row)
    total = zeros_of(BLOCK_M, BLOCK_N, SWAP)
    up = zeros_of(BLOCK_M, BLOCK_N, SWAP)
    for first in range(0, depth, BLOCK_K):
        x_tile = load_tile(x_at, first, depth, EVEN, BLOCK_K)
        total = times(x_tile, load_tile(w_at, first, depth, EVEN, BLOCK_K), total, SWAP)
        if UP:
            up_at = w_at + columns.to(tl.int64) * depth
            up = times(x_tile, load_tile(up_at, first, depth, EVEN, BLOCK_K), up, SWAP)
    y = _scaled(total, x_scale, tl.load(w_scales + w_row), SWAP)
    if UP:
        y = y / (1.0 + tl.exp(-y)) * _scaled(up, x_scale, tl.load(w_scales + w_row + columns), SWAP)
    else:
        y *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
    tl.store(
        out + pair.to(tl.int64)[:, None] * columns + n[None, :],
        y.to(out.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )


def product(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    aligned: Alignment | None,
    dtype: torch.dtype,
    config: Config,
) -> Tensor:
    """Compute one grouped GEMM.

    Args:
        x: Tokens [T, H] for the first GEMM, pairs [T * K, I] for the second.
        x_scales: float32 [rows of x], one per row.
        w: int8 [E, rows, depth].
        w_scales: float32 [E, rows].
        ids: [T, K].
        weights: float32 [T, K] for the second GEMM; None: the first.
        aligned: An alignment with the configuration's block_m; None ("dense"): every expert gets
            tiles of all tokens.
        dtype: Result's dtype.
        config: This GEMM's configuration.

    Returns:
        silu(gate) * up [T * K, I], or weighted rows [T * K, H]. Rows of experts of other
        ranks are not written.
    """
    experts, rows, depth = w.shape
    columns = rows // 2 if weights is None else rows
    out = torch.empty(ids.numel(), columns, dtype=dtype, device=x.device)
    m_blocks = (
        experts * cdiv(ids.shape[0], config["block_m"])
        if aligned is None
        else len(aligned.expert_of_block)
    )
    n_blocks = cdiv(columns, config["block_n"])
    tile_lists = (ids, ids) if aligned is None else (aligned.sorted_pairs, aligned.expert_of_block)
    _grouped[(m_blocks * n_blocks,)](
        x,
        x_scales,
        w,
        w_scales,
        out,
        ids,
        x_scales if weights is None else weights,
        *tile_lists,
        ids.numel(),
        experts,
        columns,
        depth,
        m_blocks,
        n_blocks,
        config.get("group", 64),
        UP=weights is None,
        SORTED=aligned is not None,
        TOPK=ids.shape[1],
        WIDTH=next_power_of_2(ids.shape[1]),
        SWAP=bool(config["swap"]),
        EVEN=depth % config["block_k"] == 0,
        BLOCK_M=config["block_m"],
        BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"],
        num_warps=config["warps"],
        num_stages=config["stages"],
        **dependent_launch.options(),
    )
    return out


def int8_experts_rule(tokens: int, per_token: int, experts: int) -> Mapping[str, Config]:
    """Return configurations {"up", "down"} of both GEMMs for sizes without a tuned table.

    There are ``tokens`` tokens, each with ``per_token`` of ``experts`` experts. For few tokens the
    configurations are "dense", which needs no alignment.
    """
    load = tokens * per_token / experts
    if load <= 64:
        block = 16 if load <= 12 else 32 if load <= 28 else 64
        each = {
            "dense": int(tokens <= DENSE_TOKENS_MAX),
            "block_m": block,
            "block_n": 128,
            "block_k": 128,
            "warps": 4,
            "stages": 3,
            "swap": 1,
        }
        return {"up": {**each, "block_n": 64}, "down": each}
    each = {
        "dense": 0,
        "block_m": 128,
        "block_k": 128,
        "warps": 8,
        "stages": 3,
        "swap": 0,
        "group": 8,
    }
    return {"up": {**each, "block_n": 64}, "down": {**each, "block_n": 128}}


def experts(
    x: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    w2: Tensor,
    scales2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    config: Mapping[str, Config] | None = None,
) -> Tensor:
    """Compute the weighted sum of each token's experts.

    Args:
        x: int8 [T, H].
        x_scales: float32 [T].
        w13: int8 [E, 2I, H].
        scales13: float32 [E, 2I].
        w2: int8 [E, H, I].
        scales2: float32 [E, H].
        ids: [T, K]; -1: an expert of another rank.
        weights: float32 [T, K].
        dtype: Result's dtype.
        config: {"up", "down"}; None: from a table or the rule.

    Returns:
        [T, H].
    """
    return moe_sum(
        expert_rows(x, x_scales, w13, scales13, w2, scales2, ids, weights, dtype, config), ids
    )


def expert_rows(
    x: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    w2: Tensor,
    scales2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    config: Mapping[str, Config] | None = None,
) -> Tensor:
    """Compute the weighted output of every (token, expert) pair: [T * K, H], for ``moe_sum``.

    The arguments are those of :func:`experts`. Rows of experts of other ranks are not written.
    """
    if not len(x):
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    chosen = config or narrow_experts_config(
        DTYPE, int8_experts_rule, len(x), ids.shape[1], w13.shape[0], w2.shape[2], w2.shape[1]
    )
    aligned = None if chosen["up"]["dense"] else align(ids, w13.shape[0], chosen["up"]["block_m"])
    hidden = product(x, x_scales, w13, scales13, ids, None, aligned, dtype, chosen["up"])
    inner, inner_scales = int8_triton.quantize(hidden)
    return product(inner, inner_scales, w2, scales2, ids, weights, aligned, dtype, chosen["down"])
