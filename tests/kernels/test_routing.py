"""Gates against a slow formula of their papers, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glowplug.kernels.moe.route_reference import topk_sigmoid, topk_softmax

CASES = [  # experts, k, groups, topk_groups
    (8, 2, 1, 1),
    (16, 4, 4, 2),
    (64, 6, 8, 3),
    (256, 8, 8, 4),
    (12, 3, 3, 2),
    (6, 6, 1, 1),
    (8, 4, 4, 4),
]


def chosen(
    choice: list[float],
    scores: list[float],
    k: int,
    groups: int,
    topk_groups: int,
    top: int,
) -> dict[int, float]:
    """Return expert -> score of the k best by ``choice`` in the best groups; a group counts its
    ``top`` best.
    """
    size = len(choice) // groups
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-top:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -worth[g])[:topk_groups]
    allowed = [e for e in range(len(choice)) if e // size in best]
    return {e: scores[e] for e in sorted(allowed, key=lambda e: -choice[e])[:k]}


def assert_same(weights: Tensor, ids: Tensor, wanted: list[dict[int, float]]) -> None:
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    for row, expected in enumerate(wanted):
        got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert got.keys() == expected.keys()
        assert got == pytest.approx(expected, rel=1e-5)


def finish(scores: dict[int, float], renormalize: bool, scale: float) -> dict[int, float]:
    total = sum(scores.values()) if renormalize else 1.0
    return {expert: score / total * scale for expert, score in scores.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_gate(case: tuple[int, int, int, int], renormalize: bool) -> None:
    experts, k, groups, topk_groups = case
    logits = torch.randn(9, experts, generator=torch.Generator().manual_seed(experts))
    wanted = []
    for row in logits.tolist():
        total = sum(math.exp(v) for v in row)
        scores = [math.exp(v) / total for v in row]
        wanted.append(finish(chosen(scores, scores, k, groups, topk_groups, 1), renormalize, 1.7))
    assert_same(*topk_softmax(logits, k, groups, topk_groups, renormalize, 1.7), wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_sigmoid_gate(case: tuple[int, int, int, int], renormalize: bool) -> None:
    experts, k, groups, topk_groups = case
    generator = torch.Generator().manual_seed(experts + 1)
    logits = torch.randn(9, experts, generator=generator)
    bias = torch.randn(
        experts, generator=generator
    )  # large and of both signs: choice and weight differ
    wanted = []
    for row in logits.tolist():
        scores = [1 / (1 + math.exp(-v)) for v in row]
        choice = [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        wanted.append(finish(chosen(choice, scores, k, groups, topk_groups, 2), renormalize, 2.5))
    before = logits.clone()
    assert_same(*topk_sigmoid(logits, bias, k, groups, topk_groups, renormalize, 2.5), wanted)
    assert torch.equal(logits, before)


def test_the_bias_moves_the_choice_and_not_the_weight() -> None:
    logits = torch.zeros(1, 4)
    weights, ids = topk_sigmoid(logits, torch.tensor([0.0, 9.0, 0.0, 8.0]), 2, 1, 1, False, 1.0)
    assert sorted(ids[0].tolist()) == [1, 3]
    assert weights[0].tolist() == [0.5, 0.5]
