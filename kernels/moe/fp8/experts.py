"""Routed experts in block FP8: both grouped GEMMs, by the kernels that a configuration names."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.fp8 import gemm_hopper
from glowplug.kernels.moe.fp8.gemm import fetch_of, gated_product, product
from glowplug.kernels.moe.fp8.pair_tiles import tiles_of
from glowplug.kernels.moe.fp8.tiles import on_hopper
from glowplug.kernels.moe.sort import gather_rows
from glowplug.kernels.moe.sum import moe_sum


def hopper_gated_product(
    x: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    ids: Tensor,
    order: Alignment,
    dtype: torch.dtype,
    config: Config,
) -> tuple[Tensor, Tensor]:
    """Compute the quantised silu(gate) * up of sorted (token, expert) pairs by the Hopper kernel.

    Args:
        x: E4M3 [T, H].
        x_scales: float32 [T, H / 128], column-major.
        w13: E4M3 [E, 2I, H], gates before ups.
        scales13: float32 [E, 2I / 128, H / 128].
        ids: [T, K].
        order: The alignment of ``ids``, with R positions.
        dtype: Dtype between the GEMM and the quantisation, of 16 bits.
        config: Configuration with the key ``GROUP``.

    Returns:
        values E4M3 [R, I] and scales float32 [R, I / 128], column-major.
    """
    rows, row_scales, _ = gather_rows(x, x_scales, order, ids)
    hidden = gemm_hopper.gated(rows, row_scales, w13, scales13, order, ids.numel(), dtype, config)
    del rows, row_scales
    return fp8_triton.quantize(hidden)


def products(
    x: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    w2: Tensor,
    scales2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    config: Config,
) -> Tensor:
    """Compute the weighted output of every (token, expert) pair: [T * K, H], for ``moe_sum``.

    Args:
        x: E4M3 [T, H].
        x_scales: float32 [T, ceil(H / 128)], column-major.
        w13: E4M3 [E, 2I, H], gates before ups.
        scales13: float32, one per 128x128 block of ``w13``.
        w2: E4M3 [E, H, I].
        scales2: float32, one per 128x128 block of ``w2``.
        ids: int [T, K]; -1: an expert of another rank.
        weights: float32 [T, K].
        dtype: Result's dtype.
        config: A configuration of ``moe.fp8.tiles``.
    """
    per_token = ids.shape[1]
    pairs = ids.numel()
    tile = config["BLOCK_M"]
    if on_hopper(config):
        return _products_on_hopper(
            x, x_scales, w13, scales13, w2, scales2, ids, weights, dtype, config
        )
    tiles = tiles_of(ids, w13.shape[0], config)
    if config["FUSE"]:
        inner, inner_scales = gated_product(
            x, x_scales, w13, scales13, tiles, tile, pairs, per_token, config["first"]
        )
    else:
        hidden = product(
            x, x_scales, w13, scales13, tiles, tile, pairs, per_token, dtype, config["first"]
        )
        inner, inner_scales = fp8_triton.silu_and_mul(hidden)
    return product(
        inner,
        inner_scales,
        w2,
        scales2,
        tiles,
        tile,
        pairs,
        1,
        dtype,
        config["second"],
        weights,
        fetch=fetch_of(tile),
    )


def _products_on_hopper(
    x: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    scales13: Tensor,
    w2: Tensor,
    scales2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    config: Config,
) -> Tensor:
    """Compute :func:`products` with the Hopper kernel."""
    order = align(ids, w13.shape[0], config["BLOCK_M"])
    inner, inner_scales = hopper_gated_product(
        x, x_scales, w13, scales13, ids, order, dtype, config["first"]
    )
    return gemm_hopper.product(
        inner, inner_scales, w2, scales2, order, weights, dtype, config["second"]
    )


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
    config: Config,
) -> Tensor:
    """Compute the weighted sum of each token's experts: [T, H].

    The arguments are those of :func:`products`.
    """
    return moe_sum(
        products(x, x_scales, w13, scales13, w2, scales2, ids, weights, dtype, config), ids
    )
