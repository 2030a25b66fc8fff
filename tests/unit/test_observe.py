"""The step timer tells work from bubbles and from idleness."""
from __future__ import annotations

import pytest

from glowplug.core.observe import StepTimer


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
    at(timer, clock, (0, "launch"), (1, "launch"), (4, "done"), (5, "launch"), (8, "done"), (12, "done"))
    assert (timer.steps, timer.step_seconds, timer.bubble_seconds) == (3, 12.0, 0.0)


def test_the_gap_before_a_launch_is_a_bubble() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    at(timer, clock, (0, "launch"), (3, "done"), (4, "launch"), (7, "done"))
    assert (timer.step_seconds, timer.bubble_seconds) == (7.0, 1.0)


def test_idle_time_is_neither() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    at(timer, clock, (0, "launch"), (3, "done"), (3, "idle"), (100, "launch"), (102, "done"))
    assert (timer.step_seconds, timer.bubble_seconds) == (5.0, 0.0)


def test_the_device_knows_better() -> None:
    """Overlapping steps whose device waited for the second; the pause before the third was no work."""
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
