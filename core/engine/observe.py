"""Step observers, and the meters of the engine's loop: times, and counts of drafts.

Observers are called directly after each commit, never through hooks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from glowplug.core.engine.draft_meter import DraftMeter
from glowplug.core.engine.in_flight import InFlight
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import Stats, StepOutput
from glowplug.core.step.sequence_table import SequenceTable


class StepObserver(Protocol):
    """An object that a plugin registers (hook ``step_observers``) to receive each committed step.

    ``step`` runs on the loop's thread, so it may take microseconds only. It must not raise.
    """

    def step(self, batch: Batch, output: StepOutput) -> None:
        """Receive a committed batch and its output, for example to count them.

        Both belong to the engine: they may be read, but not changed or kept.
        """
        ...


class StepTimer:
    """A timer of steps and of bubbles: times without device work although there were requests.

    ``launch`` must be called for every launch, ``done`` for every result read, and ``idle`` when
    there is nothing to do.

    Attributes:
        steps: number of steps done.
        step_seconds: time in steps: from one result to the next, or from the launch after a pause.
        bubble_seconds: time without device work before steps: the sum of the times passed to
            ``done``. For a step without such a time, it is the time from the last result to the
            launch, if no step was in flight.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # of each step in flight, the gap before it on the host; None: there was no work before
        self._gaps: deque[float | None] = deque()
        self._since: float | None = None  # time of the last result; None: idle since then
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
        """Record that the result of the oldest step in flight has been read.

        Args:
            waited: seconds without device work before the step; None: not measured.
        """
        now = self._clock()
        assert self._gaps and self._since is not None, "a result without a launch"
        gap = self._gaps.popleft()
        if gap is not None:
            self.bubble_seconds += gap if waited is None else waited
        self.steps += 1
        self.step_seconds += now - self._since
        self._since = now

    def idle(self) -> None:
        """Record that there is nothing to do: the time until the next launch is not counted."""
        if not self._gaps:
            self._since = None


class PrefillTimer:
    """A timer from a sequence's admission to its first token, for any scheduler.

    A sequence that is preempted in between keeps its start. Steps without a prompt cost no time.
    """

    def __init__(self, table: SequenceTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock

    def launch(self, batch: Batch) -> None:
        """Set the start time of the sequences of ``batch`` that enter a row for the first time."""
        if batch.joined:
            now = self._clock()
            for sequence in batch.joined:
                if sequence.started is None:
                    sequence.started = now

    def done(self, batch: Batch, result: StepResult) -> list[tuple[int, float]]:
        """Return (id, seconds since its start) of each sequence whose first token is in ``result``.

        This must be called before the step is committed.
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


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """The fields of a step's output that the meters set; see ``StepOutput``."""

    prefilled: list[tuple[int, float]]
    drafts: int
    prompted: list[int]
    fewer: dict[int, int]

    def add_to(self, output: StepOutput) -> None:
        """Set the fields in ``output``."""
        output.prefilled = self.prefilled
        output.drafts = self.drafts
        output.prompted = self.prompted
        output.fewer = self.fewer


class StepMeters:
    """The meters of the steps of one rank's group."""

    def __init__(self, plan: EnginePlan, table: SequenceTable) -> None:
        self._own = StepTimer()  # of this group's steps
        self._busy = StepTimer()  # of all groups' steps
        self._prefills = PrefillTimer(table)
        self._drafts = DraftMeter(plan.sizes.draft_shape, table)

    def launch(self, batch: Batch) -> None:
        """Record a launch; the timer of the group's own steps leaves out idle ones."""
        self._busy.launch()
        self._prefills.launch(batch)
        if batch.mode is Mode.IDLE:
            self._own.idle()
        else:
            self._own.launch()

    def done(self, inflight: InFlight, result: StepResult) -> MeasuredStep | None:
        """Record the result of the oldest step in flight; call this before it is committed.

        Returns:
            The fields to set in the step's output; None if the step was idle.
        """
        batch = inflight.batch
        self._busy.done()
        if batch.mode is Mode.IDLE:
            return None
        self._own.done(inflight.waited)
        return MeasuredStep(self._prefills.done(batch, result), *self._drafts.done(batch, result))

    def idle(self, everywhere: bool) -> None:
        """Record that this group has nothing to do; ``everywhere``: no other group has either."""
        self._own.idle()
        if everywhere:
            self._busy.idle()

    def fill(self, stats: Stats) -> None:
        """Set the times of steps and the counters of drafts in ``stats``."""
        stats.step_seconds = self._own.step_seconds
        stats.bubble_seconds = self._own.bubble_seconds
        stats.busy_seconds = self._busy.step_seconds
        self._drafts.fill(stats)
