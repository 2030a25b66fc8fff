"""Routed experts in Triton, in the way and with the tiles that ``moe_tiles`` gives for the number
of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import (
    fused_shared as moe_shared,
    gemm as moe_gemm,
    gemm_hopper as moe_gemm_hopper,
    gemv as moe_gemv,
    route,
)
from glowplug.kernels.moe.align import align, max_blocks
from glowplug.kernels.moe.gemm import Early
from glowplug.kernels.moe.sum import moe_sum
from glowplug.kernels.moe.tiles import Problem, chosen, has_wide_tiles

#: Tokens for which everybody's experts begin before the gate has chosen. NOTE: their programs hold
#: multiprocessors and wait for the gate's sign (V2-Lite: 132 at most); they start only when all of
#: the gate's and the alignment's have.
FEWEST_EARLY = 5
MOST_EARLY = 384


def begin(
    x: Tensor,
    w13: Tensor,
    width: int,
    shared: int,
    begun: Tensor,
    config: Mapping[str, Config] | None = None,
) -> Early | None:
    """What :func:`products` of x with ids [T, width] needs to begin with the ``shared`` last
    experts early; its gate is to be called next, with ``begun`` int32 [2], zeros. None: there is
    nothing to begin with, or a gate that need not tell chooses sooner.
    """
    tokens = len(x)
    (experts, double, hidden) = w13.shape
    if not shared or not FEWEST_EARLY <= tokens <= MOST_EARLY or not x.is_contiguous():
        return None
    if tokens >= route.many(experts - shared):
        return None
    config = config or chosen(
        Problem(experts, width, hidden, double // 2, str(x.dtype).split(".")[1]), tokens
    )
    up = config["up"]
    if has_wide_tiles(up, tokens):
        places = (
            max_blocks(tokens * (width - shared), experts - shared, up["block_m"]) * up["block_m"]
        )
    elif up["way"] == config["down"]["way"] == "dense":
        places = tokens * width
    else:
        return None
    return Early(
        begun, torch.empty(places + shared * tokens, double // 2, dtype=x.dtype, device=x.device)
    )


def products(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config] | None = None,
    shared: int = 0,
    early: Early | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [T, H], w13 [E, 2I, H] gates before ups, w2 [E, H, I], ids [T, K] (-1: elsewhere), weights
    float32 [T, K] -> weighted rows [T * K', H] and ids [T, K'] for ``moe_sum``, or their sums [T,
    H] and None.

    A token names an expert at most once. No step depends on a value on the host. ``shared``: the
    last so many experts are the last ones of every token's, in order, with weight 1; they may
    become one row, whose id is the first's.
    ``early``: of :func:`begin`, for the same x and the ids that its gate chose.
    """
    if not len(x):
        return torch.empty_like(x), None
    if config is None:
        config = chosen(
            Problem(
                w13.shape[0], ids.shape[1], w13.shape[2], w2.shape[2], str(x.dtype).split(".")[1]
            ),
            len(x),
        )
    up = config["up"]
    down = config["down"]
    if up["way"] == "hopper":
        return _large(x, w13, w2, ids, weights, config, shared if up["apart"] else 0)
    wide = shared if early is not None or has_wide_tiles(up, len(x)) else 0
    aligned = align(ids, len(w13) - wide, up["block_m"], wide) if up["way"] == "sorted" else None
    hidden = (
        moe_gemv.up(x, w13, ids, up)
        if up["way"] == "gemv"
        else moe_gemm.up(x, w13, ids, aligned, up, wide, early)
    )
    if down["way"] == "gemv":
        return moe_gemv.down(hidden, w2, ids, weights, down), None
    return moe_gemm.down(hidden, w2, ids, weights, aligned, down, wide), ids


def _large(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config],
    apart: int,
) -> tuple[Tensor, Tensor]:
    """:func:`products` by the kernel for Hopper, and of the ``apart`` last experts by dense ones."""
    routed = len(w13) - apart
    kept = ids.shape[1] - max(apart - 1, 0)
    rows = torch.empty(len(x), kept, w2.shape[1], dtype=x.dtype, device=x.device)
    if apart:
        moe_shared.mlp(x, w13[routed:], w2[routed:], rows[:, -1])
    if routed:
        aligned = align(ids, routed, config["up"]["block_m"], apart)
        hidden = moe_gemm_hopper.up(x, w13, ids, aligned, config["up"])
        moe_gemm_hopper.down(hidden, w2, weights, aligned, config["down"], rows)
    return rows.view(-1, w2.shape[1]), ids[:, :kept]


def experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config] | None = None,
    shared: int = 0,
    early: Early | None = None,
) -> Tensor:
    """:func:`products` added up: [T, H]."""
    rows, named = products(x, w13, w2, ids, weights, config, shared, early)
    return rows if named is None else moe_sum(rows, named)
