"""The bounds of the stall watch, and its cost in a step."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from glowplug.core.engine.stalls import (
    STALL_SECONDS,
    STALL_TURNS,
    TOKENLESS_STEPS,
    Stall,
    StallWatch,
)
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, StepResult, idle_batch
from glowplug.core.step.messages import Finished, Stats, StepOutput
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.simple import FirstCome


class World:
    """A table of ``rows`` running sequences and its watch."""

    def __init__(self, rows: int) -> None:
        self.table = SequenceTable(rows, 64, 4)
        self.watch = StallWatch(bare_plan(), FirstCome(), self.table)
        for id in range(rows):
            self.admit(id)

    def admit(self, id: int) -> None:
        one = sequence(id, [1, 2, 3])
        self.table.join(one)
        self.watch.live[id] = one

    def step(self, counts: list[int], bad: list[bool] | None = None) -> Stall | None:
        """Run a decoding step of the first rows, in which row i gains ``counts[i]`` tokens."""
        size = len(counts)
        batch = idle_batch()
        batch.mode, batch.rows = Mode.DECODE, np.arange(size, dtype=np.int32)
        batch.epochs, batch.samples = self.table.epoch[batch.rows].copy(), np.ones(size, np.bool_)
        result = StepResult(
            np.zeros((size, 1), np.int64),
            np.array(counts, np.int32),
            np.array(bad or [False] * size),
        )
        gained = [i for i, count in enumerate(counts) if count and not result.bad[i]]
        several = [counts[i] for i in gained] if max(counts) > 1 else []
        output = StepOutput(ids=gained, tokens=[0] * sum(counts), counts=several)
        return self.watch.stepped(batch, result, output)

    def calls_of_a_step(self) -> int:
        """Count the Python and C calls of the watch in a step in which every running row gains a
        token.
        """
        count = 0

        def tracer(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        stepped = self.watch.stepped

        def traced(batch: Batch, result: StepResult, output: StepOutput) -> Stall | None:
            sys.setprofile(tracer)
            try:
                return stepped(batch, result, output)
            finally:
                sys.setprofile(None)

        self.watch.stepped = traced  # type: ignore[method-assign]
        try:
            assert self.step([1] * sum(one is not None for one in self.table.sequences)) is None
        finally:
            self.watch.stepped = stepped  # type: ignore[method-assign]
        return count


def test_turns_and_seconds_must_both_pass() -> None:
    load = Stats(waiting=1)
    for turns, pace, expected in (
        (STALL_TURNS + 5, STALL_SECONDS / 1e4, False),
        (STALL_TURNS - 1, 10.0, False),
        (STALL_TURNS, 2 * STALL_SECONDS / STALL_TURNS, True),
    ):
        watch = World(1).watch
        found = [watch.still(100.0 + pace * turn, load) for turn in range(turns)]
        assert [stall is not None for stall in found] == [False] * (turns - 1) + [expected]


def test_a_step_starts_the_count_again() -> None:
    watch = World(1).watch
    for turn in range(STALL_TURNS - 1):
        watch.still(float(turn), Stats(waiting=1))
    watch.moved()
    assert watch.still(1e6, Stats(waiting=1)) is None


def test_an_ended_sequence_is_not_ended_again() -> None:
    world = World(2)
    world.watch.ended([Finished(0, "stop")])
    found = [world.watch.still(float(turn), Stats(waiting=1)) for turn in range(STALL_TURNS)]
    assert found[-1] is not None and found[-1].ids == [1]


def test_only_consecutive_steps_without_a_token_count() -> None:
    world = World(2)
    assert all(world.step([1, 0]) is None for _ in range(TOKENLESS_STEPS - 1))
    assert world.step([1, 1]) is None
    assert all(world.step([1, 0]) is None for _ in range(TOKENLESS_STEPS - 1))
    found = world.step([1, 0])
    assert found is not None and found.ids == [1]


def test_a_row_without_finite_logits_is_left_to_the_scheduler() -> None:
    world = World(1)
    assert all(world.step([0], bad=[True]) is None for _ in range(2 * TOKENLESS_STEPS))


def test_a_row_s_count_does_not_outlive_its_sequence() -> None:
    world = World(2)
    for _ in range(TOKENLESS_STEPS - 1):
        world.step([1, 0])
    world.table.leave(1)
    world.step([1])
    assert world.calls_of_a_step() == World(2).calls_of_a_step(), (
        "later steps take the short way again"
    )
    world.admit(7)
    assert all(world.step([1, 0]) is None for _ in range(TOKENLESS_STEPS - 1))


@pytest.mark.parametrize("rows", [8, 256])
def test_a_step_costs_a_few_calls_whatever_its_rows(rows: int) -> None:
    assert World(rows).calls_of_a_step() <= 8
