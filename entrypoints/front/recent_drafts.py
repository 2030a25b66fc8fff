"""The engine's counters of verified drafts over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from glowplug.core.step.draft_counts import DraftCounts, since

SPAN = 60.0  #: seconds that the counters cover
SAMPLE_EVERY = 1.0  #: seconds between two snapshots


class RecentDrafts:
    """Snapshots of the counters, from which those of the last ``SPAN`` seconds follow."""

    def __init__(self) -> None:
        # (time, counters); the first snapshot is the only one that may be older than SPAN
        self._snapshots: deque[tuple[float, Sequence[DraftCounts]]] = deque()
        self._due = 0.0

    def note(self, now: float, counts: Sequence[DraftCounts]) -> None:
        """Keep a snapshot if one is due.

        Args:
            now: monotonic time in seconds.
            counts: the counters since the start; they must not change later.
        """
        if now < self._due:
            return
        self._due = now + SAMPLE_EVERY
        self._snapshots.append((now, counts))
        self._drop(now)

    def counts(self, now: float, counts: Sequence[DraftCounts]) -> list[DraftCounts]:
        """Return what the counters have gained in the last ``SPAN`` seconds.

        Without a snapshot this old they are the counters since the first one. Arguments as in
        ``note``.
        """
        self._drop(now)
        return since(counts, self._snapshots[0][1] if self._snapshots else [])

    def _drop(self, now: float) -> None:
        """Drop the snapshots that are older than the latest one from before the span."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - SPAN:
            self._snapshots.popleft()
