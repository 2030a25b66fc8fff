"""Counts of verified drafts of a group's steps, and the warning when their acceptance falls."""

from __future__ import annotations

import logging
from collections import deque

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.draft_counts import Acceptance, DraftCounts
from glowplug.core.step.messages import Stats
from glowplug.core.step.sequence_table import SequenceTable

logger = logging.getLogger("glowplug.engine")

#: verify steps of rows whose acceptance is compared: the standard error of a mean over 2,000 steps
#: of up to eight tokens is below 0.08 tokens, a quarter of LEAST_FALL
WATCHED_STEPS = 2000
#: share of the accepted drafts per step at the start below which they have fallen: other prompts
#: move the acceptance of a trained draft by less, a draft without its cache entries loses all
FALLEN_SHARE = 0.5
#: least fall in tokens per step: less than that changes speed by too little to look for the cause
LEAST_FALL = 0.3
#: share of the accepted drafts per step at the start from which on the next fall is reported: above
#: FALLEN_SHARE, so that an acceptance near it is reported once
RECOVERED_SHARE = 0.75
COUNTED_STEPS = 16  #: steps of one shape whose results are counted together

Ints = NDArray[np.int32]


class FallWatch:
    """A watch over the accepted drafts per verify step, of one shape of drafts.

    Attributes:
        start: accepted drafts per step of the first ``WATCHED_STEPS``; None before.
        fallen: the last steps accept far fewer drafts than the first ones.
    """

    def __init__(self) -> None:
        self.start: float | None = None
        self.fallen = False
        self._window: deque[tuple[int, int]] = deque()  # (verify steps, accepted drafts)
        self._steps = 0
        self._accepted = 0

    @property
    def running(self) -> float:
        """Accepted drafts per step of the last ``WATCHED_STEPS``."""
        return self._accepted / max(1, self._steps)

    def add(self, steps: int, accepted: int) -> bool:
        """Add the verify steps of one engine step.

        Returns:
            True if the acceptance has fallen with them.
        """
        self._window.append((steps, accepted))
        self._steps += steps
        self._accepted += accepted
        while self._steps - self._window[0][0] >= WATCHED_STEPS:
            gone, lost = self._window.popleft()
            self._steps -= gone
            self._accepted -= lost
        if self._steps < WATCHED_STEPS:
            return False
        if self.start is None:
            self.start = self.running
        if self.fallen:
            self.fallen = self.running < RECOVERED_SHARE * self.start
            return False
        fall = self.start - self.running
        self.fallen = self.running < FALLEN_SHARE * self.start and fall >= LEAST_FALL
        return self.fallen


class _ShapeMeter:
    """Counters of the steps whose drafts have one shape.

    Results are kept for some steps and counted together, in a third of the time.

    Attributes:
        shape: the shape.
        engine_steps: steps with decoding rows.
        accepted: verify steps of rows by number of accepted drafts, [steps + 1].
        absent: as ``DraftCounts.absent``; None if all rows had as many drafts as the shape.
        watch: watch over the acceptance.
        pending: for each step not counted yet, the tokens that rows gained, and their drafts or
            None if all had as many as the shape.
    """

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape
        self.engine_steps = 0
        self.accepted = np.zeros(shape.steps + 1, np.int64)
        self.absent: NDArray[np.int64] | None = None
        self.watch = FallWatch()
        self.pending: list[tuple[Ints, Ints | None]] = []

    def count_pending(self) -> bool:
        """Count the pending results; return whether the acceptance has fallen with them."""
        if not self.pending:
            return False
        gained = np.concatenate([tokens for tokens, _ in self.pending])
        given = [drafts for _, drafts in self.pending if drafts is not None]
        self.pending.clear()
        if given:
            absent = (np.concatenate(given)[:, None] <= np.arange(self.shape.tokens - 1)).sum(0)
            self.absent = absent if self.absent is None else self.absent + absent
        accepted = np.bincount(gained, minlength=self.shape.steps + 2)[1:]
        self.accepted += accepted
        steps = len(gained)
        return steps > 0 and self.watch.add(steps, int(accepted @ np.arange(len(accepted))))

    def counters(self) -> DraftCounts:
        """Return the counters, without pending results."""
        shape = self.shape
        return DraftCounts(
            shape.steps,
            shape.topk,
            shape.tokens,
            self.engine_steps,
            self.accepted.tolist() if self.accepted.any() else [],
            [] if self.absent is None else self.absent.tolist(),
        )


class DraftMeter:
    """Counters of the verified drafts of one group's steps, for each shape of drafts.

    A result of a sequence that has ended or was preempted since the launch does not count.

    Args:
        shape: the plan's shape.
        table: the group's sequence table.
    """

    def __init__(self, shape: DraftShape, table: SequenceTable) -> None:
        self._shape = shape
        self._table = table
        self._meters: dict[DraftShape, _ShapeMeter] = {}
        self._falls = 0

    def done(self, batch: Batch, result: StepResult) -> tuple[int, list[int], dict[int, int]]:
        """Count the drafts of a step; call this before the step is committed.

        Returns:
            ``StepOutput.drafts``, ``StepOutput.prompted`` and ``StepOutput.fewer`` of the step.
        """
        decodes = batch.num_decodes
        if not decodes or self._shape.tokens == 1:
            return 0, [], {}
        shape = batch.draft_shape or self._shape
        meter = self._meter_of(shape)
        meter.engine_steps += 1
        most = shape.tokens - 1
        if not most:
            return 0, [], {}
        rows = batch.rows
        current = self._table.epoch[rows] == batch.epochs
        live = current & batch.samples
        self._keep(meter, result, live[:decodes])
        prompted = self._ids(rows[decodes:][live[decodes:]]) if decodes < len(rows) else []
        fewer = self._fewer(rows[:decodes], current[:decodes], result.drafts, most)
        return most, prompted, fewer

    def _meter_of(self, shape: DraftShape) -> _ShapeMeter:
        """Return the counters of the steps with drafts of ``shape``."""
        found = self._meters.get(shape)
        if found is None:
            found = self._meters[shape] = _ShapeMeter(shape)
        return found

    def _fewer(
        self,
        rows: Ints,
        current: NDArray[np.bool_],
        given: Ints | None,
        most: int,
    ) -> dict[int, int]:
        """Return the number of drafts of each sequence that had fewer than ``most``.

        Args:
            rows: decoding rows, [D].
            current: rows whose sequence has not changed since the launch, [D].
            given: drafts of the rows, [D]; None: all had ``most``.
        """
        if given is None:
            return {}
        less = (given < most) & current
        return dict(zip(self._ids(rows[less]), given[less].tolist(), strict=True))

    def _keep(self, meter: _ShapeMeter, result: StepResult, live: NDArray[np.bool_]) -> None:
        """Keep the results of the decoding rows for which ``live`` [D] is True."""
        gained = result.counts[: len(live)]
        counted = live & ~result.bad[: len(live)] & (gained > 0)
        given = result.drafts
        if given is not None:
            counted &= given > 0
        # copies, as results may be views of memory that later steps reuse
        meter.pending.append((gained[counted], None if given is None else given[counted]))
        if len(meter.pending) == COUNTED_STEPS:
            self._count(meter)

    def _ids(self, rows: Ints) -> list[int]:
        """Return the ids of the sequences in ``rows``."""
        found = [self._table.sequences[row] for row in rows.tolist()]
        return [sequence.id for sequence in found if sequence is not None]

    def _count(self, meter: _ShapeMeter) -> None:
        """Count the pending results, and log and count a fall of the acceptance."""
        if not meter.count_pending():
            return
        self._falls += 1
        watch = meter.watch
        assert watch.start is not None, "a fall is one from the start"
        logger.warning(
            "the acceptance of drafts has fallen: %.2f tokens per step in the last %d verify steps "
            "(drafts %s), %.2f in the first; the prompts may differ, or drafts lack cache entries",
            1 + watch.running,
            WATCHED_STEPS,
            meter.shape,
            1 + watch.start,
        )

    def fill(self, stats: Stats) -> None:
        """Set the counters of drafts in ``stats``."""
        for meter in self._meters.values():
            self._count(meter)
        stats.drafts = [meter.counters() for meter in self._meters.values()]
        found = Acceptance(stats.drafts)
        stats.drafted_tokens = found.drafted
        stats.accepted_tokens = found.accepted
        stats.acceptance_falls = self._falls
