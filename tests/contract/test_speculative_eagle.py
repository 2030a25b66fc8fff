"""EAGLE in the speculative slot: the conformance suite, draft ids and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits, Worker
from glowplug.core.step.batch import Batch
from glowplug.core.step.graph_pieces import DraftExtend
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.speculative import (
    HIDDEN,
    VOCAB,
    Greedy,
    SpeculativeSuite,
    likely,
    step,
)
from glowplug.plugins.speculative.eagle import EagleOptions
from glowplug.plugins.speculative.eagle_runtime import Eagle

PAGE = 4
DRAFT_VOCAB = 7
IDS = torch.arange(1, VOCAB, 3)[:DRAFT_VOCAB]  #: target's ids of the draft vocabulary


class Head:
    """A head (with its family and its attention) that drafts the ids of its vocabulary in turn."""

    target_ids: Tensor | None = IDS

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def build_eagle(self, context: Any, target: Any) -> Head:
        return self

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        return

    def states(self, hidden: Tensor) -> Tensor:
        return hidden[:, :HIDDEN] + 1

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        assert (input_ids < VOCAB).all()
        state: Tensor = batch.extra["previous_hidden"]
        self.seen.append(state)
        return state + 1

    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        assert previous.shape[1] == HIDDEN

    def logits(self, hidden: Tensor) -> Tensor:
        order = torch.arange(DRAFT_VOCAB, 0, -1).float()
        return order.expand(len(hidden), DRAFT_VOCAB).contiguous()


def make(limits: Limits, shape: DraftShape) -> tuple[Eagle, Head]:
    plan = bare_plan(page_size=PAGE, width=shape.tokens, lookahead=1, draft_shape=shape)
    options = EagleOptions(steps=shape.steps, topk=shape.topk)
    algorithm, head = Eagle(options, plan, Worker(dtype=torch.float32)), Head()
    context: Any = SimpleNamespace(attention=head, draft_extend=DraftExtend(), collectives=None)
    assert algorithm.draft_model(context, head, head) is head  # type: ignore[arg-type, comparison-overlap]
    algorithm.reserve(limits)
    return algorithm, head


class TestEagle(SpeculativeSuite):
    def make(self, limits: Limits) -> Eagle:
        return make(limits, DraftShape.chain(3))[0]


def drafted(shape: DraftShape, features: int) -> tuple[Tensor, list[Tensor]]:
    """Return the drafts after a prompt, and the states that each pass continued."""
    limits = Limits(rows=8, context=99, num_pages=33, width=4, vocab=VOCAB, hidden=HIDDEN)
    algorithm, head = make(limits, shape)
    hidden = torch.randn(3, HIDDEN * (1 + features), generator=torch.Generator().manual_seed(1))
    algorithm.accept(likely([2]), hidden, step([5], 0, [3], [3]), Greedy())
    batch = step([5], 1, [shape.tokens], [3 + shape.tokens])
    tokens = algorithm.draft(batch)
    torch.testing.assert_close(head.seen[0], hidden[-1:, :HIDDEN] + 1)
    return tokens, head.seen


def test_a_chain_has_ids_of_the_target_and_continues_its_own_output() -> None:
    tokens, seen = drafted(DraftShape.chain(3), features=3)
    assert tokens.tolist() == [[2, *[int(IDS[0])] * 3]]
    for number, state in enumerate(seen):
        torch.testing.assert_close(state, seen[0] + number)


def test_a_tree_has_ids_of_the_target() -> None:
    tokens, _ = drafted(DraftShape(2, 3, 6), features=0)
    assert tokens[0, 0] == 2 and set(tokens[0, 1:].tolist()) <= set(IDS[:3].tolist())
    assert len(set(tokens[0, 1:].tolist())) > 1
