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
        self._engine_steps: dict[DraftShape, int] = {}
        self._accepted: dict[DraftShape, NDArray[np.int64]] = {}
        self._absent: dict[DraftShape, NDArray[np.int64]] = {}
        self._watches: dict[DraftShape, FallWatch] = {}
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
        self._engine_steps[shape] = self._engine_steps.get(shape, 0) + 1
        most = shape.tokens - 1
        if not most:
            return 0, [], {}
        live = (self._table.epoch[batch.rows] == batch.epochs) & batch.samples
        self._count_live(shape, result, live[:decodes])
        prompted = self._ids(batch.rows[decodes:][live[decodes:]])
        given = result.drafts
        return most, prompted, {} if given is None else self._fewer(batch, given, most)

    def _count_live(self, shape: DraftShape, result: StepResult, live: NDArray[np.bool_]) -> None:
        """Count the drafts of the decoding rows for which ``live`` [D] is True."""
        gained = result.counts[: len(live)]
        counted = live & ~result.bad[: len(live)] & (gained > 0)
        given = result.drafts
        if given is not None:
            counted &= given > 0
            self._count_absent(shape, given[counted])
        self._count(shape, gained[counted])

    def _fewer(self, batch: Batch, given: NDArray[np.int32], most: int) -> dict[int, int]:
        """Return the number of drafts of each sequence that has fewer than ``most``."""
        rows = batch.rows[: batch.num_decodes]
        less = (given < most) & (self._table.epoch[rows] == batch.epochs[: len(rows)])
        return dict(zip(self._ids(rows[less]), given[less].tolist(), strict=True))

    def _count_absent(self, shape: DraftShape, given: NDArray[np.int32]) -> None:
        """Count the drafts that rows with ``given`` drafts lack, by their place in the row."""
        absent = (given[:, None] <= np.arange(shape.tokens - 1)).sum(0)
        held = self._absent.get(shape)
        self._absent[shape] = absent if held is None else held + absent

    def _ids(self, rows: NDArray[np.int32]) -> list[int]:
        """Return the ids of the sequences in ``rows``."""
        found = [self._table.sequences[row] for row in rows.tolist()]
        return [sequence.id for sequence in found if sequence is not None]

    def _count(self, shape: DraftShape, gained: NDArray[np.int32]) -> None:
        """Count one verify step for each of ``gained``, the tokens of its row."""
        counts = np.bincount(gained, minlength=shape.steps + 2)[1:]
        held = self._accepted.get(shape)
        self._accepted[shape] = counts if held is None else held + counts
        self._watch(shape, counts)

    def _watch(self, shape: DraftShape, counts: NDArray[np.int64]) -> None:
        """Count and log a fall of the acceptance; ``counts``: verify steps by accepted drafts."""
        watch = self._watches.setdefault(shape, FallWatch())
        steps = int(counts.sum())
        if not steps or not watch.add(steps, int(counts @ np.arange(len(counts)))):
            return
        self._falls += 1
        assert watch.start is not None, "a fall is one from the start"
        logger.warning(
            "the acceptance of drafts has fallen: %.2f tokens per step in the last %d verify steps "
            "(drafts %s), %.2f in the first; the prompts may differ, or drafts lack cache entries",
            1 + watch.running,
            WATCHED_STEPS,
            shape,
            1 + watch.start,
        )

    def fill(self, stats: Stats) -> None:
        """Set the counters of drafts in ``stats``."""
        stats.drafts = [
            DraftCounts(
                shape.steps,
                shape.topk,
                shape.tokens,
                steps,
                self._accepted[shape].tolist() if shape in self._accepted else [],
                self._absent[shape].tolist() if shape in self._absent else [],
            )
            for shape, steps in self._engine_steps.items()
        ]
        found = Acceptance(stats.drafts)
        stats.drafted_tokens = found.drafted
        stats.accepted_tokens = found.accepted
        stats.acceptance_falls = self._falls
