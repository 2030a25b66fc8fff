"""Routed experts in Triton and Gluon; ``moe.tiles`` selects kernels and tiles by token count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.kernels.elementwise.activation import silu_and_mul
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import (
    gemm,
    gemm_hopper,
    gemv,
    route,
)
from glowplug.kernels.moe.align import align, max_blocks
from glowplug.kernels.moe.gemm import Early
from glowplug.kernels.moe.sum import moe_sum
from glowplug.kernels.moe.tiles import (
    ExpertsProblem,
    dense_experts_config,
    fused_shared_has_own_tiles,
)

#: fewest tokens for which the fused shared experts start before the gate has chosen experts
EARLY_TOKENS_MIN = 5
#: most tokens for which the fused shared experts start early. NOTE: their programs occupy
#: multiprocessors while they spin on the gate's ready flag (V2-Lite: at most 132 programs); they
#: start only after all programs of the gate and of the alignment have started.
EARLY_TOKENS_MAX = 384


def begin(
    x: Tensor,
    w13: Tensor,
    width: int,
    fused_shared: int,
    ready: Tensor,
    config: Mapping[str, Config] | None = None,
) -> Early | None:
    """Allocate the buffers that let fused shared experts start while the gate still runs.

    The next kernel must be the gate (``moe.route.route``) with the same ``ready``.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gates before ups.
        width: Columns of the ids [T, width], fused shared experts included.
        fused_shared: Number of fused shared experts, the last ones of ``w13``.
        ready: int32 [2], zeros: the gate's ready flag and its count of readers.
        config: The tile configurations of both GEMMs; None: chosen by shape and token count.

    Returns:
        The buffers; None if there are no fused shared experts, if their kernels cannot start early,
        or if a gate without a ready flag is faster.
    """
    tokens = len(x)
    (experts, double, hidden) = w13.shape
    if (
        not fused_shared
        or not EARLY_TOKENS_MIN <= tokens <= EARLY_TOKENS_MAX
        or not x.is_contiguous()
    ):
        return None
    if tokens >= route.library_tokens_min(experts - fused_shared):
        return None
    config = config or dense_experts_config(
        ExpertsProblem(experts, width, hidden, double // 2, str(x.dtype).split(".")[1]), tokens
    )
    up = config["up"]
    if fused_shared_has_own_tiles(up, tokens):
        rows = (
            max_blocks(tokens * (width - fused_shared), experts - fused_shared, up["block_m"])
            * up["block_m"]
        )
    elif up["way"] == config["down"]["way"] == "dense":
        rows = tokens * width
    else:
        return None
    return Early(
        ready,
        torch.empty(rows + fused_shared * tokens, double // 2, dtype=x.dtype, device=x.device),
    )


def products(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config] | None = None,
    fused_shared: int = 0,
    early: Early | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the weighted output of every (token, expert) pair.

    A token must not name an expert twice. No value is read back to the host.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gates before ups.
        w2: [E, H, I].
        ids: [T, K]; -1: an expert of another rank.
        weights: float32 [T, K].
        config: The tile configurations of both GEMMs; None: chosen by shape and token count.
        fused_shared: Number of fused shared experts: the last experts, which are the last ones of
            every token, in order, with weight 1. Their results may be returned as one summed row
            per token, with the id of the first of them.
        early: The result of :func:`begin` for the same x and the ids that the gate chose.

    Returns:
        Weighted rows [T * K', H] and ids [T, K'] for ``moe_sum``, or the sums [T, H] and None.
    """
    if not len(x):
        return torch.empty_like(x), None
    if config is None:
        config = dense_experts_config(
            ExpertsProblem(
                w13.shape[0], ids.shape[1], w13.shape[2], w2.shape[2], str(x.dtype).split(".")[1]
            ),
            len(x),
        )
    up = config["up"]
    down = config["down"]
    if up["way"] == "hopper":
        return _products_on_hopper(
            x, w13, w2, ids, weights, config, fused_shared if up["apart"] else 0
        )
    own_tiles = early is not None or fused_shared_has_own_tiles(up, len(x))
    separate = fused_shared if own_tiles else 0  # fused shared experts outside the alignment
    aligned = (
        align(ids, len(w13) - separate, up["block_m"], separate) if up["way"] == "sorted" else None
    )
    hidden = (
        gemv.up(x, w13, ids, up)
        if up["way"] == "gemv"
        else gemm.up(x, w13, ids, aligned, up, separate, early)
    )
    if down["way"] == "gemv":
        return gemv.down(hidden, w2, ids, weights, down), None
    return gemm.down(hidden, w2, ids, weights, aligned, down, separate), ids


def fused_shared_mlp(x: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """Write the sum of S fused shared experts' outputs to ``out``, computed as a dense MLP.

    This is fast for loads that are limited by the tensor cores.

    NOTE: a single GEMM over all S of w2 would need them side by side, [H, S * I], a layout that no
    other kernel here reads.

    Args:
        x: [T, H].
        w13: [S, 2I, H], gates before ups.
        w2: [S, H, I].
        out: [T, H]; its rows may be strided.
    """
    experts, width, hidden = w13.shape
    inner = silu_and_mul(torch.mm(x, w13.view(-1, hidden).t()).view(-1, width)).view(
        len(x), experts, width // 2
    )
    torch.mm(inner[:, 0], w2[0].t(), out=out)
    for expert in range(1, experts):
        torch.addmm(out, inner[:, expert], w2[expert].t(), out=out)


def _products_on_hopper(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config],
    dense_shared: int,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`products` with the Hopper kernel.

    The last ``dense_shared`` experts, fused shared experts, are computed as a dense MLP.
    """
    routed = len(w13) - dense_shared
    kept = ids.shape[1] - max(dense_shared - 1, 0)
    rows = torch.empty(len(x), kept, w2.shape[1], dtype=x.dtype, device=x.device)
    if dense_shared:
        fused_shared_mlp(x, w13[routed:], w2[routed:], rows[:, -1])
    if routed:
        aligned = align(ids, routed, config["up"]["block_m"], dense_shared)
        hidden = gemm_hopper.up(x, w13, ids, aligned, config["up"])
        gemm_hopper.down(hidden, w2, weights, aligned, config["down"], rows)
    return rows.view(-1, w2.shape[1]), ids[:, :kept]


def experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    config: Mapping[str, Config] | None = None,
    fused_shared: int = 0,
    early: Early | None = None,
) -> Tensor:
    """Compute the weighted sum of each token's experts: [T, H].

    The arguments are those of :func:`products`.
    """
    rows, named = products(x, w13, w2, ids, weights, config, fused_shared, early)
    return rows if named is None else moe_sum(rows, named)
