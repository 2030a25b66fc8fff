"""Choice of experts from the scores of the MoE gate, and their weights."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # score of an expert in an excluded group
INVALID: tl.constexpr = tl.constexpr(-1.0e30)  # replaces NaN: chosen last, but a valid expert


@triton.jit
def _best_groups(
    choice, group, within, G2: tl.constexpr, TOPK_GROUPS: tl.constexpr, SIGMOID: tl.constexpr
):
    """Return the mask of the best groups, bool [R, G2, 1].

    A group is ranked by its best expert, with ``SIGMOID`` by the sum of its two best experts.
    """
    if SIGMOID:
        best, at = tl.max(choice, 2, return_indices=True)
        best += tl.max(tl.where(within[None, None, :] == at[:, :, None], float("-inf"), choice), 2)
    else:
        best = tl.max(choice, 2)
    kept = group[None, :] < tl.zeros_like(best).to(tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        hit = group[None, :] == tl.argmax(best, 1)[:, None]
        kept = kept | hit
        best = tl.where(hit, float("-inf"), best)
    return kept[:, :, None]


@triton.jit
def choose(
    logits,
    bias,
    weights,
    ids,
    first,
    tokens,
    experts,
    scale,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    G2: tl.constexpr,
    PER2: tl.constexpr,
    TOPK: tl.constexpr,
    FUSED_SHARED: tl.constexpr,
    OUT2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Choose the experts of ROWS tokens from ``first`` on; store their ids and weights.

    Scores are arranged as [token, group, expert].
    """
    per = experts // GROUPS
    row, group, within = first + tl.arange(0, ROWS), tl.arange(0, G2), tl.arange(0, PER2)
    real = ((group[:, None] < GROUPS) & (within[None, :] < per))[None, :, :]
    expert = (group[:, None] * per + within[None, :])[None, :, :]
    at = row.to(tl.int64)[:, None, None] * experts + expert
    score = tl.zeros((ROWS, G2, PER2), tl.float32)
    for split in tl.static_range(SPLITS):
        score += tl.load(
            logits + tokens.to(tl.int64) * split * experts + at,
            mask=real & (row < tokens)[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
        choice = score + tl.load(bias + expert, mask=real, other=0.0)
    else:
        score = tl.where(real, score, float("-inf"))
        score = tl.exp(score - tl.max(tl.max(score, 2), 1)[:, None, None])
        score = score / tl.sum(tl.sum(score, 2), 1)[:, None, None]
        choice = score
    choice = tl.where(choice == choice, choice, INVALID)
    choice = tl.where(real, choice, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        kept = _best_groups(choice, group, within, G2, TOPK_GROUPS, SIGMOID)
        choice = tl.where(real & (kept == 0), LOWEST if SIGMOID else 0.0, choice)
    choice = tl.reshape(choice, (ROWS, G2 * PER2))
    score = tl.reshape(score, (ROWS, G2 * PER2))

    place, column = tl.arange(0, G2 * PER2), tl.arange(0, OUT2)
    found = tl.zeros((ROWS, OUT2), tl.float32)
    chosen = tl.zeros((ROWS, OUT2), tl.int32) + (experts - TOPK + column)[None, :]
    for j in tl.static_range(TOPK):
        value, best = tl.max(choice, 1, return_indices=True)
        hit = place[None, :] == best[:, None]
        if SIGMOID or TOPK_GROUPS < GROUPS:  # experts are chosen by other numbers than scores
            value = tl.sum(tl.where(hit, score, 0.0), 1)
        choice = tl.where(hit, float("-inf"), choice)
        found = tl.where(column[None, :] == j, value[:, None], found)
        chosen = tl.where(column[None, :] == j, (best // PER2 * per + best % PER2)[:, None], chosen)
    found = tl.where(found == INVALID, float("nan"), found)
    if RENORMALIZE:
        found = found / (tl.sum(found, 1)[:, None] + 1e-20)
    found = tl.where(column[None, :] < TOPK, found * scale, 1.0)
    out = row.to(tl.int64)[:, None] * (TOPK + FUSED_SHARED) + column[None, :]
    inside = (row < tokens)[:, None] & (column < TOPK + FUSED_SHARED)[None, :]
    tl.store(weights + out, found, mask=inside)
    tl.store(ids + out, chosen, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _choose_each(
    logits,
    bias,
    weights,
    ids,
    tokens,
    experts,
    scale,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    G2: tl.constexpr,
    PER2: tl.constexpr,
    TOPK: tl.constexpr,
    FUSED_SHARED: tl.constexpr,
    OUT2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Choose the experts of one token per program."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    choose(
        logits,
        bias,
        weights,
        ids,
        tl.program_id(0),
        tokens,
        experts,
        scale,
        1,
        SPLITS,
        GROUPS,
        TOPK_GROUPS,
        G2,
        PER2,
        TOPK,
        FUSED_SHARED,
        OUT2,
        SIGMOID,
        RENORMALIZE,
    )


def choice_constants(
    experts: int,
    k: int,
    groups: int,
    topk_groups: int,
    fused_shared: int,
    sigmoid: bool,
    renormalize: bool,
) -> dict[str, int]:
    """Return the compile-time constants of a gate's choice, for ``_route`` and ``_choose_each``.

    The arguments are those of ``route``. Without a limit on groups all experts form one group.
    """
    is_limited = topk_groups < groups
    groups, topk_groups = (groups, topk_groups) if is_limited else (1, 1)
    return {
        "GROUPS": groups,
        "TOPK_GROUPS": topk_groups,
        "G2": next_power_of_2(groups),
        "PER2": next_power_of_2(experts // groups),
        "TOPK": k,
        "FUSED_SHARED": fused_shared,
        "OUT2": next_power_of_2(k + fused_shared),
        "SIGMOID": sigmoid,
        "RENORMALIZE": renormalize,
    }


def choose_each(
    logits: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    scale: float,
    constants: Mapping[str, int],
) -> None:
    """Choose each token's experts, with one warp per token.

    Args:
        logits: scores float32 [T, E], or [splits, T, E] to be summed over the splits.
        bias: float32 [E] or None, see ``route``.
        weights: float32 [T, K + A], written.
        ids: int32 [T, K + A], written.
        scale: factor on the weights.
        constants: those of :func:`choice_constants`, SPLITS and the launch options.
    """
    tokens = len(ids)
    _choose_each[(tokens,)](
        logits, bias, weights, ids, tokens, logits.shape[-1], scale, num_warps=1, **constants
    )
