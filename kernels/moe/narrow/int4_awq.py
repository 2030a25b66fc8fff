"""Grouped GEMMs of routed experts with int4 weights.

The weights have the layout of ``kernels/formats/awq.py`` with a leading dimension of experts:
packed int16 [E, blocks, N, 32], factors int32 [E, groups, N]. w13 holds gates, then ups. Numbers
are unpacked in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.gemm.int4_awq import (
    DTYPE,
    PACKED_BLOCK,
    PLANE,
    load_plane,
    load_rows,
    scale_of,
    times,
)
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.gemm_tile import tile_pairs, tile_place
from glowplug.kernels.moe.narrow.tiles import DENSE_TOKENS_MAX, narrow_experts_config
from glowplug.kernels.moe.sum import moe_sum


class Weights(NamedTuple):
    """The weights of all experts for one GEMM.

    Attributes:
        packed: int16 [E, blocks, N, 32].
        factors: int32 [E, groups, N].
        group: Inputs that share a scale.
        depth: Number of inputs.
    """

    packed: Tensor
    factors: Tensor
    group: int
    depth: int


@triton.jit(do_not_specialize=["pairs", "experts", "m_blocks", "n_blocks", "order"])
def _grouped(
    x,
    packed,
    factors,
    out,
    ids,
    weights,
    sorted_pairs,
    expert_of_block,
    pairs,
    experts,
    columns,
    depth,
    groups,
    m_blocks,
    n_blocks,
    order,
    UP: tl.constexpr,
    SORTED: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of a grouped GEMM.

    With ``UP`` x has a row per token and out[pair] = silu(gate) * up for each (token, expert) pair.
    Otherwise x has a row per pair, and the results are multiplied by the routing weights.
    """
    dependent_launch.begin(DEPENDENT)
    block_row, column_block = tile_place(m_blocks, n_blocks, order)
    dependent_launch.wait(DEPENDENT)
    expert, pair = tile_pairs(
        ids, sorted_pairs, expert_of_block, block_row, pairs, experts, SORTED, TOPK, WIDTH, BLOCK_M
    )
    if expert < 0:
        return
    real = pair < pairs
    row = tl.where(real, pair, 0)
    if UP:
        row = row // TOPK
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    every = columns * (2 if UP else 1)  # outputs of an expert
    step = columns.to(tl.int64) * (2 if UP else 1) * PLANE
    lane = tl.arange(0, PLANE)
    blocks = tl.cdiv(depth, PACKED_BLOCK)
    x_at = x + row.to(tl.int64)[:, None] * depth + lane[None, :]
    w_at = packed + (expert.to(tl.int64) * blocks * every + n)[:, None] * PLANE + lane[None, :]
    grid = expert.to(tl.int64) * groups * every
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(blocks, num_stages=STAGES):  # num_stages also pipelines factors
        at = w_at + block * step
        words = load_rows(at, inside[:, None], EVEN_N)
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if UP:
            up_words = load_rows(at + columns * PLANE, inside[:, None], EVEN_N)
            up_part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for plane in tl.static_range(4):
            first = block * PACKED_BLOCK + plane * PLANE
            if plane == 0 or (plane * PLANE) % GROUP == 0:
                group = first // GROUP
                if GROUP < PACKED_BLOCK and not EVEN:
                    group = tl.where(first < depth, group, 0)
                place = grid + group * every + n
                factor = load_rows(factors + place, inside, EVEN_N)
                if UP:
                    up_factor = load_rows(factors + place + columns, inside, EVEN_N)
            value = load_plane(x_at, first, depth, EVEN)
            part = times(words, factor, value, part, plane)
            if UP:
                up_part = times(up_words, up_factor, value, up_part, plane)
            if plane == 3 or ((plane + 1) * PLANE) % GROUP == 0:
                total += part * scale_of(factor)[:, None]
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                if UP:
                    up += up_part * scale_of(up_factor)[:, None]
                    up_part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if UP:
        total = total / (1.0 + tl.exp(-total)) * up
    y = tl.trans(total)
    if not UP:
        y *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
    tl.store(
        out + pair.to(tl.int64)[:, None] * columns + n[None, :],
        y.to(out.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )


def product(
    x: Tensor,
    w: Weights,
    ids: Tensor,
    weights: Tensor | None,
    aligned: Alignment | None,
    config: Config,
) -> Tensor:
    """Compute one grouped GEMM.

    Args:
        x: Tokens [T, H] for the first GEMM, pairs [T * K, I] for the second.
        w: The weights.
        ids: [T, K].
        weights: float32 [T, K] for the second GEMM; None: the first.
        aligned: An alignment with the configuration's block_m; None ("dense"): every expert gets
            tiles of all tokens.
        config: This GEMM's configuration.

    Returns:
        silu(gate) * up [T * K, I], or weighted rows [T * K, H]. Rows of experts of other
        ranks are not written.
    """
    experts, _, rows, _ = w.packed.shape
    columns = rows // 2 if weights is None else rows
    out = torch.empty(ids.numel(), columns, dtype=x.dtype, device=x.device)
    m_blocks = (
        experts * cdiv(ids.shape[0], config["block_m"])
        if aligned is None
        else len(aligned.expert_of_block)
    )
    n_blocks = cdiv(columns, config["block_n"])
    tile_lists = (ids, ids) if aligned is None else (aligned.sorted_pairs, aligned.expert_of_block)
    _grouped[(m_blocks * n_blocks,)](
        x,
        w.packed,
        w.factors,
        out,
        ids,
        w.factors if weights is None else weights,
        *tile_lists,
        ids.numel(),
        experts,
        columns,
        w.depth,
        w.factors.shape[1],
        m_blocks,
        n_blocks,
        config.get("group", 64),
        UP=weights is None,
        SORTED=aligned is not None,
        TOPK=ids.shape[1],
        WIDTH=next_power_of_2(ids.shape[1]),
        GROUP=w.group,
        EVEN=w.depth % 128 == 0,
        EVEN_N=columns % config["block_n"] == 0,
        BLOCK_M=config["block_m"],
        BLOCK_N=config["block_n"],
        STAGES=config["stages"],
        num_warps=config["warps"],
        **dependent_launch.options(),
    )
    return out


def int4_experts_rule(tokens: int, per_token: int, experts: int) -> Mapping[str, Config]:
    """Return configurations {"up", "down"} of both GEMMs for sizes without a tuned table.

    There are ``tokens`` tokens, each with ``per_token`` of ``experts`` experts. For few tokens the
    configurations are "dense", which needs no alignment.
    """
    load = tokens * per_token / experts
    if load <= 64:
        block = 16 if load <= 24 else 32 if load <= 28 else 64
        each = {
            "dense": int(tokens <= DENSE_TOKENS_MAX),
            "block_m": block,
            "block_n": 64,
            "warps": 4,
            "stages": 4,
        }
        return {"up": each, "down": each}
    each = {"dense": 0, "block_m": 128, "block_n": 64, "warps": 4, "stages": 3, "group": 8}
    return {"up": each, "down": {**each, "block_n": 128, "warps": 8}}


def experts(
    x: Tensor,
    w13: Weights,
    w2: Weights,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config] | None = None,
) -> Tensor:
    """Compute the weighted sum of each token's experts.

    Args:
        x: [T, H], contiguous.
        w13: Weights of the first GEMM.
        w2: Weights of the second GEMM.
        ids: [T, K]; -1: an expert of another rank.
        weights: float32 [T, K].
        config: {"up", "down"}; None: from a table or the rule.

    Returns:
        [T, H].
    """
    return moe_sum(expert_rows(x, w13, w2, ids, weights, config), ids)


def expert_rows(
    x: Tensor,
    w13: Weights,
    w2: Weights,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config] | None = None,
) -> Tensor:
    """Compute the weighted output of every (token, expert) pair: [T * K, H], for ``moe_sum``.

    The arguments are those of :func:`experts`. Rows of experts of other ranks are not written.
    """
    if not len(x):
        return torch.empty_like(x)
    count = w13.packed.shape[0]
    chosen = config or narrow_experts_config(
        DTYPE, int4_experts_rule, len(x), ids.shape[1], count, w2.depth, w13.depth
    )
    aligned = None if chosen["up"]["dense"] else align(ids, count, chosen["up"]["block_m"])
    hidden = product(x, w13, ids, None, aligned, chosen["up"])
    return product(hidden, w2, ids, weights, aligned, chosen["down"])
