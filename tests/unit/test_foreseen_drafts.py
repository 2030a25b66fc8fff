"""Steps are plain if no row has drafts for them, by the last known results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.speculation.foreseen_drafts import FixedDrafts, ForeseenDrafts
from glowplug.plugins.scheduler.continuous_decodes import Decodes
from tests.support.random_drafts import RandomDrafts

FULL = DraftShape.chain(3)


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def test_a_step_is_plain_if_no_row_has_drafts() -> None:
    policy = ForeseenDrafts(FixedDrafts(FULL), 4)
    assert policy.choose(rows(0, 2), 2) == FULL, "nothing is known of the rows"
    policy.expect(rows(0, 2), rows(0, 3))
    assert policy.choose(rows(0, 2), 2) == FULL
    assert policy.choose(rows(0), 1) == NO_DRAFTS
    policy.expect(rows(2), rows(0))
    assert policy.choose(rows(0, 2), 2) == NO_DRAFTS
    assert policy.choose(rows(0, 1), 2) == FULL, "row 1 may have drafts"
    policy.forget(0)
    assert policy.choose(rows(0), 1) == FULL, "another sequence has entered the row"


class Noted(RandomDrafts):
    """A policy that notes in which order it learns of results and of further drafts."""

    def __init__(self) -> None:
        super().__init__((FULL,))
        self.calls: list[tuple[str, list[int]]] = []

    def observe(self, rows: Any, shape: Any, counts: Any) -> None:
        self.calls.append(("observe", counts.tolist()))

    def expect(self, rows: Any, drafts: Any) -> None:
        self.calls.append(("expect", drafts.tolist()))


def test_results_come_before_the_drafts_of_the_next_step() -> None:
    """So the drafts known at a result are those of its step."""
    sizes = SimpleNamespace(step_shapes=(FULL,), context_length=9, width=FULL.tokens)
    decodes = Decodes(*[None] * 2, sizes, lambda: 0.0)  # type: ignore[arg-type]
    inner = Noted()
    decodes.policy = ForeseenDrafts(inner, 2)
    decodes.policy.clocked = False
    batch = SimpleNamespace(agreed=None, num_decodes=2, draft_shape=FULL)
    done = SimpleNamespace(rows=rows(0, 1), at=np.arange(2), given=rows(4, 1))
    decodes.committed(batch, done, SimpleNamespace(next_drafts=rows(0, 3)))  # type: ignore[arg-type]
    assert inner.calls == [("observe", [4, 1]), ("expect", [0, 3])]


def test_all_else_is_left_to_the_other_policy() -> None:
    """It is not called for steps that are plain anyway."""
    shapes = (DraftShape.chain(1), FULL)
    inner = RandomDrafts(shapes)
    policy = ForeseenDrafts(inner, 2)
    assert policy.clocked and policy.choose(rows(1), 1) == inner.chosen[-1]
    policy.observe(rows(1), FULL, rows(2))
    policy.took(1, FULL, 0.5)
    policy.expect(rows(1), rows(0))
    assert policy.choose(rows(1), 1) == NO_DRAFTS
    assert len(inner.chosen) == 1
    assert inner.observed == [(FULL, [2])] and inner.seconds == [0.5]
