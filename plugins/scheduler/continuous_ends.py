"""Ends of sequences in the continuous scheduler: rows and pages are freed, faults are reported."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.loading import describe
from glowplug.core.step.messages import Finished, Stats
from glowplug.plugins.scheduler.continuous_admission import Admitter
from glowplug.plugins.scheduler.continuous_checks import check_pages
from glowplug.plugins.scheduler.continuous_commit import PromptScores
from glowplug.plugins.scheduler.continuous_queue import QUEUED
from glowplug.plugins.scheduler.continuous_rows import Rows
from glowplug.plugins.scheduler.continuous_stats import count_end


class SequenceEnds:
    """The ends of sequences that wait or run.

    Args:
        rows: the running sequences and their pages.
        admission: the waiting sequences.
        scores: prompt log-probabilities already sent.
        stats: counts the ends.
    """

    def __init__(self, rows: Rows, admission: Admitter, scores: PromptScores, stats: Stats) -> None:
        self._rows = rows
        self._queue = admission.queue
        self._admission = admission
        self._scores = scores
        self._stats = stats
        self._faults = rows.faults

    def row_of(self, id: int) -> int | None:
        """Return the row of a running sequence; None if it does not run."""
        found = np.flatnonzero(self._rows.ids == id)
        return next((row for row in found.tolist() if row in self._rows.running), None)

    def end(self, end: Finished, keep: bool = True) -> Finished | None:
        """Remove a sequence and free its pages at once.

        Args:
            end: its end.
            keep: give its computed pages to the cache.

        Returns:
            The end, see ``counted``; None if the id is unknown.
        """
        if self._queue.pop(end.id) is None:
            row = self.row_of(end.id)
            if row is None:
                return None
            self._rows.release(row, keep)
        self._admission.forget(end.id)
        self._admission.retry()
        return self.counted(end)

    def counted(self, end: Finished) -> Finished:
        """Count the end of a sequence without row, and return it.

        If the cache failed to take the sequence's pages, the error replaces ``end``.
        """
        self._scores.forget(end.id)
        error = self._faults.found.pop(end.id, None)
        if error is not None:
            end = Finished(end.id, "error", None, str(error), error.code)
        count_end(self._stats, end.reason)
        return end

    def failed(self) -> Iterator[Finished]:
        """End the sequences for which a call has failed, and yield their ends."""
        for id, error in list(self._faults.found.items()):
            end = Finished(id, "error", None, str(error), error.code)
            yield self.end(end, keep=False) or self.counted(end)

    def overdue(self, now: float) -> Iterator[Finished]:
        """End the sequences past a deadline, and yield their ends.

        A sequence that has begun no longer has a limit of its time in the queue.
        """
        for id, kind in self._queue.overdue(now):
            waiting = self._queue.get(id)
            if kind == QUEUED and (waiting is None or waiting.preemptions):
                continue
            what = "waited too long in the queue" if kind == QUEUED else "took too long"
            end = self.end(Finished(id, "timeout", None, f"the request {what}", kind))
            if end is not None:
                yield end

    def check_accounts(self) -> None:
        """Check the pages' owners if a call has failed since the last check.

        A call that failed half-way may have changed what other sequences share.

        Raises:
            GlowplugError: the accounts disagree, or the cache's own data do.
        """
        error = self._faults.last
        if error is None:
            return
        self._faults.last = None
        try:
            check_pages(self._rows)
        except Exception as broken:
            raise GlowplugError(
                f"{error}\n    all requests end, because the accounts of pages disagree after it: "
                f"{describe(broken)}"
            ) from broken
