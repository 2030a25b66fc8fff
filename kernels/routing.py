"""Expert gates of DeepSeek-V2 (softmax) and V3 (sigmoid with a correction bias), limited to groups or not.

Logits are float32 [T, E]; the result is weights float32 [T, K] and expert ids int64 [T, K], in no particular order.
E experts form ``groups`` equal groups of which only the best ``topk_groups`` may be chosen; one group means no limit.
"""
from __future__ import annotations

import torch
from torch import Tensor


def _outside(group_scores: Tensor, topk_groups: int, experts: int) -> Tensor:
    """bool [T, E]: the expert's group is not among the best."""
    tokens, groups = group_scores.shape
    best = group_scores.topk(topk_groups, dim=-1, sorted=False).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return outside.unsqueeze(-1).expand(tokens, groups, experts // groups).reshape(tokens, experts)


def _finish(weights: Tensor, renormalize: bool, scale: float) -> Tensor:
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if scale == 1.0 else weights * scale


def topk_softmax(
    logits: Tensor, k: int, groups: int = 1, topk_groups: int = 1, renormalize: bool = False, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2: softmax scores; a group counts as much as its best expert ("group_limited_greedy")."""
    scores = logits.softmax(-1, dtype=torch.float32)
    if topk_groups < groups:
        tokens, experts = scores.shape
        best = scores.view(tokens, groups, -1).amax(-1)
        scores = scores.masked_fill(_outside(best, topk_groups, experts), 0.0)
    weights, ids = scores.topk(k, dim=-1, sorted=False)
    return _finish(weights, renormalize, scale), ids


def topk_sigmoid(
    logits: Tensor, bias: Tensor, k: int, groups: int = 1, topk_groups: int = 1, renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3 ("noaux_tc"): chosen by sigmoid + bias, weighted by the sigmoid alone.

    bias float32 [E]. A group counts as much as its two best experts together.
    """
    scores = logits.sigmoid()
    choice = scores + bias
    if topk_groups < groups:
        tokens, experts = scores.shape
        best = choice.view(tokens, groups, -1).topk(2, dim=-1, sorted=False).values.sum(-1)
        choice = choice.masked_fill_(_outside(best, topk_groups, experts), float("-inf"))
    ids = choice.topk(k, dim=-1, sorted=False).indices
    return _finish(scores.gather(1, ids), renormalize, scale), ids
