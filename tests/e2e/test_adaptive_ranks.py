"""Ranks that choose the size of their drafts by seconds in service choose alike."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import StepOutput
from glowplug.core.testing.harness.drive import Drive, sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.core.testing.harness.simple import FirstCome, KeepsNothing
from glowplug.core.testing.suites.parts.scheduler_base import ManualClock, prompt
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from tests.support.draft_requests import BASE
from tests.support.layouts import layout
from tests.support.random_drafts import RandomDrafts

REQUESTS = {1: [5, 6, 7], 2: [9], 3: [4, 8, 5, 6, 3, 2, 7], 4: [1, 2], 5: [3, 1, 4, 1, 5]}
LAYOUTS = {"tp 2": layout(2), "tp 4, ep 2, dp 2": layout(4, 2, 2)}


class Noted:
    """The calls of one rank's policy, which still decides."""

    def __init__(self, policy: Any) -> None:
        self.chosen: list[DraftShape] = []
        self.took: list[tuple[int, DraftShape, float]] = []
        choose, took = policy.choose, policy.took

        def noted_choose(rows: Any, most: int) -> DraftShape:
            self.chosen.append(choose(rows, most))
            return self.chosen[-1]

        def noted_took(rows: int, shape: DraftShape, seconds: float) -> None:
            self.took.append((rows, shape, seconds))
            took(rows, shape, seconds)

        policy.choose, policy.took = noted_choose, noted_took


@pytest.mark.parametrize(
    ("layout", "overlap"), [("tp 2", True), ("tp 4, ep 2, dp 2", False)], ids=["tp", "groups"]
)
def test_ranks_with_clocks_of_their_own_choose_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str, overlap: bool
) -> None:
    """The ranks of a group learn the same seconds, which are rank 0's."""
    plugins = load_plugins([THREADS], entry_points=False)
    config = {
        "model": str(folder),
        **BASE,
        "speculative": {"use": "nextn", "steps": 3},
        "scheduler": {"overlap": overlap, "max_running_requests": 4},
        "parallel": LAYOUTS[layout],
    }
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, _own_pace(getattr(time, name)))
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        policies = [engine.scheduler.decodes.policy for engine in ranks.engines]  # type: ignore[attr-defined]
        noted = [Noted(policy) for policy in policies]
        ranks.run([submit(id, prompt, 40) for id, prompt in REQUESTS.items()])
        ranks.check_idle()
    size = len(noted) // ranks.plan.sizes.groups
    for first in range(0, len(noted), size):
        leader, *others = noted[first : first + size]
        assert len(leader.took) > 5 and len(set(leader.chosen)) > 1
        assert all(one.chosen == leader.chosen for one in others)
        assert all(one.took == leader.took for one in others)


def _own_pace(clock: Any) -> Any:
    """Return a clock that runs at another pace in each thread."""

    def paced() -> float:
        return float(clock()) * (1 + threading.get_ident() % 97)

    return paced


@pytest.mark.parametrize("depth", [0, 1], ids=["in_turn", "overlap"])
def test_seconds_are_those_of_the_step_that_the_turn_commits(depth: int) -> None:
    """Steps beside prompts, and those before a pause, do not count."""
    shapes = (NO_DRAFTS, DraftShape.chain(1), DraftShape.chain(3))
    plan = bare_plan(width=4, draft_shapes=shapes, max_running=3)
    clock = ManualClock()
    scheduler = Continuous(ContinuousOptions(), plan, Worker(), clock)
    drive = Drive(scheduler, plan, KeepsNothing(), FirstCome(), depth=depth)
    policy = RandomDrafts(shapes, seed=4)
    noted = Noted(policy)
    scheduler.adapt(policy)
    committed: list[Batch] = []
    commit = scheduler.commit

    def noted_commit(batch: Batch, result: StepResult) -> StepOutput:
        committed.append(batch)
        return commit(batch, result)

    scheduler.commit = noted_commit  # type: ignore[method-assign]
    rng = random.Random(2)
    late = [sequence(id, prompt(rng, 5), max_tokens=30) for id in (3, 4)]
    drive.add(sequence(1, prompt(rng, 9), max_tokens=30))
    drive.add(sequence(2, prompt(rng, 3), max_tokens=25))
    for turn in range(200):
        if turn in (6, 60):  # beside decoding rows, and long after their end
            drive.add(late.pop())
        done = len(committed)
        drive.step()
        # a turn lasts as long as the step that it commits, and a second for its prompts
        for batch in committed[done:]:
            prompts = len(batch.rows) - batch.num_decodes
            clock.now += 0.1 * (batch.draft_shape or NO_DRAFTS).tokens + prompts
        if done == len(committed):
            clock.now += 7.0
    assert not late and len(noted.took) > 20
    for rows, shape, seconds in noted.took:
        assert 1 <= rows <= 3 and seconds == pytest.approx(0.1 * shape.tokens)
