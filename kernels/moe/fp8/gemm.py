"""Grouped GEMMs of routed experts in block-scaled FP8, over pairs sorted by expert.

w13 is E4M3 [E, 2I, H] (gate then up), w2 E4M3 [E, H, I], both with float32 scales of 128x128
blocks. Pair t * K + k is token t's k-th expert. Rows between the GEMMs are stored by pair, so that
padding rows cost no memory traffic. The host never waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm.fp8 import (
    PREFETCH_GROUPS,
    add_scaled,
    fetch_weight,
    load_tile,
    load_weight,
)
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.fp8 import (
    gated_splits,
)
from glowplug.kernels.moe.fp8.pair_tiles import Tiles, is_empty, pairs_of, tile_and_block


@triton.jit
def _depth(
    depth,
    x_at,
    xs_at,
    xs_stride,
    w_at,
    weight,
    w_row,
    ws_at,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Return one tile of x w^T, summed over the whole depth: [M, N], with ``SWAP`` [N, M]."""
    groups = tl.cdiv(depth, 128)
    x_scale = tl.load(xs_at)
    w_scale = tl.load(ws_at)
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, groups, ROUND):
        for step in tl.static_range(ROUND):
            group = start + step
            ahead = tl.minimum(group + 1, groups - 1)
            next_x_scale = tl.load(xs_at + ahead * xs_stride)
            next_w_scale = tl.load(ws_at + ahead)
            x_tile = load_tile(x_at, group, depth, EVEN)
            w_tile = load_weight(weight, w_row, w_at, group, depth, TMA, EVEN)
            total = add_scaled(total, x_tile, w_tile, x_scale, w_scale, False, SWAP)
            x_scale = next_x_scale
            w_scale = next_w_scale
    return total


@triton.jit(do_not_specialize=["tiles", "total_pairs", "xs_stride", "ws_stride", "ws_expert"])
def _product(
    x,
    x_scales,
    weight,
    stored,
    w_scales,
    out,
    routed,
    pairs,
    experts,
    filled,
    tiles,
    total_pairs,
    columns,
    depth,
    x_stride,
    xs_stride,
    ws_expert,
    ws_stride,
    PER_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ORDER: tl.constexpr,
    ROUND: tl.constexpr,
    FETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute out[pair] = x[pair // PER_TOKEN] W_expert^T.

    ``WEIGHTED`` multiplies by the pair's routing weight. With ``FETCH`` > 0 the previous kernel
    started after the alignment was complete, so that the alignment may be read, and weights
    prefetched, before waiting for that kernel.
    """
    if FETCH == 0:
        dependent_launch.wait(DEPENDENT)
    dependent_launch.begin(DEPENDENT)
    tile, block = tile_and_block(tiles, filled, BLOCK_M, ORDER)
    if is_empty(tile, experts, filled, BLOCK_M, ALIGNED):
        dependent_launch.wait(DEPENDENT)
        return
    first = block * BLOCK_N
    pair, expert, real = pairs_of(tile, pairs, experts, total_pairs, BLOCK_M, ALIGNED)
    if FETCH > 0:
        if DEPENDENT:
            fetch_weight(
                stored + expert * columns * depth, first, columns, 0, depth, BLOCK_N, FETCH
            )
        dependent_launch.wait(DEPENDENT)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128)
    row = tl.where(real, pair // PER_TOKEN, 0)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = stored + (expert * columns + tl.where(n < columns, n, 0))[:, None] * depth + k[None, :]
    ws_at = w_scales + expert * ws_expert + first // 128 * ws_stride
    total = _depth(
        depth,
        x_at,
        x_scales + row,
        xs_stride,
        w_at,
        weight,
        (expert * columns + first).to(tl.int32),
        ws_at,
        BLOCK_M,
        BLOCK_N,
        SWAP,
        TMA,
        EVEN,
        ROUND,
    )
    if SWAP:
        total = total.T
    if WEIGHTED:
        total *= tl.load(routed + pair, mask=real, other=0.0)[:, None]
    out_at = out + pair.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=real[:, None] & (n < columns)[None, :])


@triton.jit(
    do_not_specialize=[
        "tiles",
        "total_pairs",
        "xs_stride",
        "ws_stride",
        "ws_expert",
        "scale_stride",
    ]
)
def _gated(
    x,
    x_scales,
    weight,
    stored,
    w_scales,
    values,
    scales,
    pairs,
    experts,
    filled,
    tiles,
    total_pairs,
    inter,
    depth,
    x_stride,
    xs_stride,
    ws_expert,
    ws_stride,
    scale_stride,
    PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ORDER: tl.constexpr,
    ROUND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute values[pair], scales[pair] = quantised silu(x G^T) * (x U^T), 128 columns at once."""
    dependent_launch.wait(DEPENDENT)
    dependent_launch.begin(
        DEPENDENT
    )  # after the wait, so that the next kernel may read the alignment
    tile, block = tile_and_block(tiles, filled, BLOCK_M, ORDER)
    if is_empty(tile, experts, filled, BLOCK_M, ALIGNED):
        return
    first = block * 128
    pair, expert, real = pairs_of(tile, pairs, experts, total_pairs, BLOCK_M, ALIGNED)
    row = tl.where(real, pair // PER_TOKEN, 0)
    gate, up = gated_splits.gates_and_ups(
        x + row.to(tl.int64)[:, None] * x_stride + tl.arange(0, 128)[None, :],
        x_scales + row,
        xs_stride,
        weight,
        stored,
        w_scales + expert * ws_expert + first // 128 * ws_stride,
        ws_stride,
        expert,
        first,
        inter,
        depth,
        0,
        tl.cdiv(depth, 128),
        BLOCK_M,
        SWAP,
        TMA,
        EVEN,
        ROUND,
    )
    inner = gate / (1.0 + tl.exp(-gate)) * up
    if SWAP:
        inner = inner.T
    stored, scale = fp8_triton.quantize_rows(inner)
    n = first + tl.arange(0, 128)
    at = pair.to(tl.int64)
    tl.store(values + at[:, None] * inter + n[None, :], stored, mask=real[:, None])
    tl.store(scales + first // 128 * scale_stride + at, scale, mask=real)


def fetch_of(tile: int) -> int:
    """Return the number of depth groups of weights that the second GEMM prefetches.

    ``tile``: number of rows of a tile.
    """
    return PREFETCH_GROUPS if tile <= 32 else 0


def _weight_operand(weight: Tensor, block_n: int, tma: bool) -> Tensor | TensorDescriptor:
    """Return the operand for weight [E, N, K]: itself, or a TMA descriptor of [E * N, K]."""
    if not tma:
        return weight
    rows = weight.shape[0] * weight.shape[1]
    depth = weight.shape[2]
    return TensorDescriptor(weight, [rows, depth], [depth, 1], [block_n, FP8_BLOCK])


def _options(config: Config, tile: int, depth: int, columns: int, tiles: Tiles) -> dict[str, Any]:
    """Return the compile-time arguments of one grouped GEMM's kernel."""
    order = config.get("ORDER", "tiles")
    whole = depth % (FP8_BLOCK * config.get("ROUND", 1)) == 0
    return {
        **config,
        **dependent_launch.options(),
        "BLOCK_M": tile,
        "EVEN": depth % FP8_BLOCK == 0,
        "ALIGNED": tiles.aligned,
        "ORDER": order if tiles.aligned or order != "filled" else "tiles",
        "ROUND": config.get("ROUND", 1) if whole else 1,
        "TMA": config["TMA"] and depth % 16 == 0 and columns % config["BLOCK_N"] == 0,
    }


def product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    tiles: Tiles,
    tile: int,
    pairs: int,
    per_token: int,
    dtype: torch.dtype,
    config: Config,
    routed: Tensor | None = None,
    fetch: int = 0,
) -> Tensor:
    """Compute one grouped GEMM.

    Args:
        x: E4M3 [pairs / per_token, K].
        x_scales: float32 [pairs / per_token, ceil(K / 128)], column-major.
        weight: E4M3 [E, N, K].
        w_scales: float32, one per 128x128 block.
        tiles: The result of :func:`tiles_of`.
        tile: Rows of a tile.
        pairs: Number of (token, expert) pairs, T * K.
        per_token: Number of pairs that share a row of x: K if x has a row per token, 1 if it has
            one per pair.
        dtype: Result's dtype.
        config: This GEMM's configuration.
        routed: float32 [pairs], routing weights; None: 1.
        fetch: Depth groups of weights to prefetch before the previous kernel ends. If > 0, the
            alignment must have been computed before the previous kernel.

    Returns:
        [pairs, N].
    """
    _, columns, depth = weight.shape
    out = torch.empty(pairs, columns, dtype=dtype, device=x.device)
    options = _options(config, tile, depth, columns, tiles)
    _product[(tiles.total * cdiv(columns, config["BLOCK_N"]),)](
        x,
        x_scales,
        _weight_operand(weight, config["BLOCK_N"], options["TMA"]),
        weight,
        w_scales,
        out,
        x_scales if routed is None else routed,
        *tiles[:4],
        pairs,
        columns,
        depth,
        x.stride(0),
        x_scales.stride(1),
        w_scales.stride(0),
        w_scales.stride(1),
        PER_TOKEN=per_token,
        WEIGHTED=routed is not None,
        FETCH=fetch,
        **options,
    )
    return out


def gated_product(
    x: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    tiles: Tiles,
    tile: int,
    pairs: int,
    per_token: int,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """Compute the quantised silu(gate) * up of every (token, expert) pair.

    I must be a multiple of 128. Other arguments as in :func:`product`.

    Args:
        w13: E4M3 [E, 2I, K], gates before ups.
        scales13: float32, one per 128x128 block.

    Returns:
        values E4M3 [pairs, I] and scales float32 [pairs, I / 128], column-major.
    """
    inter = w13.shape[1] // 2
    depth = w13.shape[2]
    options = _options({**config, "BLOCK_N": FP8_BLOCK}, tile, depth, inter, tiles)
    del options["BLOCK_N"]
    splits = options.pop("SPLITS", 1)
    if splits > 1 and not tiles.aligned and gated_splits.tickets_suffice(pairs, inter):
        for name in ("BLOCK_M", "SWAP", "ALIGNED", "ORDER", "ROUND"):
            del options[name]
        return gated_splits.gated_by_splits(
            x,
            x_scales,
            _weight_operand(w13, FP8_BLOCK, options["TMA"]),
            w13,
            scales13,
            tiles.experts,
            per_token,
            splits,
            options,
        )
    values, scales = fp8_triton.empty_quantized(pairs, inter, x.device)
    _gated[(tiles.total * (inter // FP8_BLOCK),)](
        x,
        x_scales,
        _weight_operand(w13, FP8_BLOCK, options["TMA"]),
        w13,
        scales13,
        values,
        scales,
        *tiles[:4],
        pairs,
        inter,
        depth,
        x.stride(0),
        x_scales.stride(1),
        scales13.stride(0),
        scales13.stride(1),
        scales.stride(1),
        PER_TOKEN=per_token,
        **options,
    )
    return values, scales
