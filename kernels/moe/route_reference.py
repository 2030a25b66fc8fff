"""Reference gates of DeepSeek-V2 (softmax) and V3 (sigmoid with a correction bias), in torch.

Both take logits float32 [T, E] and return weights float32 [T, K] and expert ids int64 [T, K], in no
particular order. The E experts form ``groups`` equal groups, of which only the best ``topk_groups``
are eligible. One group means no limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.elementwise import cpu_small


def _exclude_groups(scores: Tensor, group_scores: Tensor, topk_groups: int, value: float) -> None:
    """Overwrite scores [T, groups, experts] with ``value``, except those of the best groups.

    ``group_scores`` [T, groups] ranks the groups; ``topk_groups`` of them stay unchanged.
    """
    best = group_scores.topk(topk_groups, dim=-1, sorted=False).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    scores.masked_fill_(outside.unsqueeze(-1), value)


def _finish(weights: Tensor, renormalize: bool, scale: float) -> Tensor:
    """Renormalise and scale ``weights`` in place."""
    if renormalize:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    return weights if scale == 1.0 else weights.mul_(scale)


def topk_softmax(
    logits: Tensor,
    k: int,
    groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by softmax scores, as DeepSeek-V2 does ("group_limited_greedy").

    A group is ranked by its best expert.

    Args:
        logits: float32 [T, E]
        k: experts chosen for a token
        groups: equal groups of experts
        topk_groups: groups from which experts are chosen
        renormalize: divide the weights of a token by their sum
        scale: factor on the weights
    """
    scores = logits.softmax(-1, dtype=torch.float32)
    if topk_groups < groups:
        by_group = scores.view(scores.shape[0], groups, scores.shape[1] // groups)
        _exclude_groups(by_group, by_group.amax(-1), topk_groups, 0.0)
    weights, ids = scores.topk(k, dim=-1, sorted=False)
    return _finish(weights, renormalize, scale), ids


def topk_sigmoid(
    logits: Tensor,
    bias: Tensor,
    k: int,
    groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by sigmoid + bias, as DeepSeek-V3 does ("noaux_tc"); weigh by the sigmoid.

    A group is ranked by the sum of its two best experts. ``bias`` is float32 [E]; other arguments
    as in :func:`topk_softmax`.
    """
    if cpu_small.is_few(logits):
        found = cpu_small.topk_sigmoid(
            logits.numpy(), bias.numpy(), k, groups, topk_groups, renormalize, scale
        )
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    return topk_sigmoid_reference(logits, bias, k, groups, topk_groups, renormalize, scale)


def topk_sigmoid_reference(
    logits: Tensor,
    bias: Tensor,
    k: int,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`topk_sigmoid` in torch, for any number of tokens."""
    scores = logits.sigmoid()
    choice = scores + bias
    if topk_groups < groups:
        by_group = choice.view(choice.shape[0], groups, choice.shape[1] // groups)
        best_two = by_group.topk(2, dim=-1, sorted=False).values
        _exclude_groups(by_group, best_two.sum(-1), topk_groups, float("-inf"))
    ids = choice.topk(k, dim=-1, sorted=False).indices
    return _finish(scores.gather(1, ids), renormalize, scale), ids
