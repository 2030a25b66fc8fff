"""Step observers: objects that watch the loop. Called directly after each commit, never through
hooks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import StepOutput
from glowplug.core.step.sequence_table import SequenceTable


class StepObserver(Protocol):
    """What the hook ``step_observers`` returns. It runs on the loop's thread: microseconds only; it
    must not raise.
    """

    def step(self, batch: Batch, output: StepOutput) -> None:
        """``batch`` was committed and yielded ``output``. Both belong to the engine: read, do not
        keep.
        """
        ...


class StepTimer:
    """How long steps take and how long the device had nothing to do although there was work (the
    bubble).

    Tell it of every ``launch``, of every result read (``done``), and when the loop has nothing to
    do (``idle``). Seconds accumulate in ``step_seconds`` (from one result to the next, or from the
    launch after a pause) and
    ``bubble_seconds``: what ``done`` is told that the device stood still before the step, or else
    the time from the last result to the launch while nothing was in flight.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._gaps: deque[float | None] = (
            deque()
        )  # of steps in flight, on the host; None: before it was no work
        self._since: float | None = None  # the last result, unless the loop was idle since
        self.steps = 0
        self.step_seconds = 0.0
        self.bubble_seconds = 0.0

    def launch(self) -> None:
        now = self._clock()
        gap = None
        if self._since is None:
            self._since = now
        elif not self._gaps:
            gap = now - self._since
        else:
            gap = 0.0
        self._gaps.append(gap)

    def done(self, waited: float | None = None) -> None:
        """``waited``: seconds without work on the device before the step, where it can tell."""
        now = self._clock()
        assert self._gaps and self._since is not None, "a result without a launch"
        gap = self._gaps.popleft()
        if gap is not None:
            self.bubble_seconds += gap if waited is None else waited
        self.steps += 1
        self.step_seconds += now - self._since
        self._since = now

    def idle(self) -> None:
        """Nothing in flight, nothing to schedule: the time until the next launch counts as neither."""
        if not self._gaps:
            self._since = None


class PrefillTimer:
    """Measures the time from a sequence's admission to its first token, for every scheduler alike.

    A sequence that is preempted in between keeps its start. Costs nothing in steps without a
    prompt.
    """

    def __init__(self, table: SequenceTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock

    def launch(self, batch: Batch) -> None:
        """Note the start of the sequences that have entered a row for the first time."""
        if batch.joined:
            now = self._clock()
            for sequence in batch.joined:
                if sequence.started is None:
                    sequence.started = now

    def done(self, batch: Batch, result: StepResult) -> list[tuple[int, float]]:
        """(id, seconds) of the sequences whose first token is in ``result``. Call before the step
        is committed.
        """
        first = batch.num_decodes
        if first == batch.num_rows:
            return []
        now = self._clock()
        found = []
        for i in (
            np.flatnonzero(batch.samples[first:] & (result.counts[first:] > 0)) + first
        ).tolist():
            row = int(batch.rows[i])
            sequence = self._table.sequences[row]
            if sequence is None or self._table.epoch[row] != batch.epochs[i] or sequence.prefilled:
                continue
            sequence.prefilled = True
            if sequence.started is not None:
                found.append((sequence.id, now - sequence.started))
        return found
