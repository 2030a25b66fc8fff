"""The step timer distinguishes work, bubbles and idle time."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.engine.observe import PrefillTimer, StepTimer
from glowplug.core.step.batch import StepResult, idle_batch
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.drive import sequence


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def at(timer: StepTimer, clock: Clock, *events: tuple[float, str]) -> None:
    for time, event in events:
        clock.now = 50.0 + time
        getattr(timer, event)()


def test_steps_that_overlap_leave_no_bubble() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    at(
        timer,
        clock,
        (0, "launch"),
        (1, "launch"),
        (4, "done"),
        (5, "launch"),
        (8, "done"),
        (12, "done"),
    )
    assert (timer.steps, timer.step_seconds, timer.bubble_seconds) == (3, 12.0, 0.0)


def test_the_gap_before_a_launch_is_a_bubble() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    at(timer, clock, (0, "launch"), (3, "done"), (4, "launch"), (7, "done"))
    assert (timer.step_seconds, timer.bubble_seconds) == (7.0, 1.0)


def test_idle_time_is_neither_work_nor_bubble() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    at(timer, clock, (0, "launch"), (3, "done"), (3, "idle"), (100, "launch"), (102, "done"))
    assert (timer.step_seconds, timer.bubble_seconds) == (5.0, 0.0)


def test_the_devices_own_waiting_time_takes_precedence() -> None:
    """The steps overlap and the device waited for the second; the pause before the third was not
    work.
    """
    clock = Clock()
    timer = StepTimer(clock)
    at(timer, clock, (0, "launch"), (1, "launch"))
    clock.now = 54.0
    timer.done(9.0)
    clock.now = 58.0
    timer.done(0.25)
    at(timer, clock, (58, "idle"), (70, "launch"))
    clock.now = 122.0
    timer.done(12.0)
    assert (timer.step_seconds, timer.bubble_seconds) == (10.0, 0.25)


def test_a_result_without_a_launch_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StepTimer().done()


# ---- prefill -------------------------------------------------------------------------------------


class Prefills:
    """A table of one row and its timer."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.table = SequenceTable(2, 64, 4)
        self.timer = PrefillTimer(self.table, self.clock)

    def step(
        self,
        time: float,
        one: Sequence,
        *,
        joins: bool = False,
        samples: bool = True,
        count: int = 1,
        decodes: int = 0,
    ) -> list[tuple[int, float]]:
        """Launch the row's step at ``time``; two seconds later it yields ``count`` tokens."""
        batch = idle_batch()
        batch.rows, batch.num_decodes = np.array([one.row], np.int32), decodes
        batch.epochs, batch.samples = self.table.epoch[batch.rows].copy(), np.array([samples])
        batch.joined = [one] if joins else []
        self.clock.now = time
        self.timer.launch(batch)
        self.clock.now = time + 2
        result = StepResult(
            np.zeros((1, 1), np.int64), np.array([count], np.int32), np.zeros(1, np.bool_)
        )
        return self.timer.done(batch, result)


def test_prefill_ends_with_the_first_token_and_is_reported_once() -> None:
    world, one = Prefills(), sequence(5, [1, 2, 3])
    world.table.join(one)
    assert world.step(10, one, joins=True, samples=False, count=0) == []
    assert world.step(20, one) == [(5, 12)]
    assert world.step(30, one, decodes=1) == [] and world.step(40, one) == []


def test_a_sequence_preempted_in_its_prefill_keeps_its_start() -> None:
    world, one = Prefills(), sequence(5, [1, 2, 3])
    world.table.join(one)
    world.step(10, one, joins=True, samples=False, count=0)
    world.table.leave(one.row)
    world.table.join(one)
    assert world.step(50, one, joins=True) == [(5, 42)]


def test_a_stale_step_ends_no_prefill() -> None:
    world, one, other = Prefills(), sequence(5, [1, 2, 3]), sequence(6, [1])
    world.table.join(one)
    world.step(10, one, joins=True, samples=False, count=0)
    batch = idle_batch()
    batch.rows, batch.epochs = np.array([one.row], np.int32), world.table.epoch[[one.row]].copy()
    batch.samples = np.ones(1, np.bool_)
    world.table.leave(one.row)
    world.table.join(other)
    result = StepResult(np.zeros((1, 1), np.int64), np.ones(1, np.int32), np.zeros(1, np.bool_))
    assert world.timer.done(batch, result) == [] and not other.prefilled
