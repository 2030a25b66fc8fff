"""Progress of the ranks while they start: lines for the log, and the end of a start that hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.messages import RunningCall
from glowplug.plugins.executors.ranks.failure_cause import LOADED, SPAWN, SPAWNING

logger = logging.getLogger("glowplug.engine")

LOG_SECONDS = 10.0  #: seconds between two lines of the log about progress
#: phases of a start, in order
PHASES = (SPAWNING, "build", "weights", "kernels", "kv", "capture", "self-test", *LOADED)
#: phases in which a rank's process starts and imports torch
FIRST_PHASES = (SPAWNING, "build")


def collective_limit(plan: EnginePlan) -> float:
    """Return the time limit of the plan's collectives, in seconds."""
    return float(plan.choice("collectives").options.get("timeout", 600.0))


class StartWatch:
    """The progress of starting ranks.

    Args:
        stall_limit: seconds without progress of any rank that end the start.
        start_limit: seconds that the whole start may take; None: no limit.
        clock: source of monotonic time, in seconds.
    """

    def __init__(
        self,
        stall_limit: float,
        start_limit: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stall_limit = stall_limit
        self._start_limit = start_limit
        self._clock = clock
        self._began = self._moved = self._logged = clock()
        self._last: dict[int, str] = {}

    @property
    def meeting_limit(self) -> float:
        """Seconds to wait for other hosts before ranks are started."""
        return self._stall_limit if self._start_limit is None else self._start_limit

    def look(
        self, progress: Mapping[int, str], calls: Mapping[int, RunningCall] | None = None
    ) -> str | None:
        """Record the progress, and log it from time to time.

        Args:
            progress: phase of each rank, with its share: "weights 41%".
            calls: the call of a plugin's code in which a rank is, for ranks that are in one.

        Returns:
            The reason to end the start; None if it goes on.
        """
        calls = calls or {}
        now = self._clock()
        if progress != self._last:
            self._last = dict(progress)
            self._moved = now
        last = _last(progress, calls)
        if last is None:
            return None
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            stands = now - self._moved >= LOG_SECONDS and last in calls
            place = f"; rank {last} is in {calls[last]}" if stands else ""
            logger.info("starting: %s%s", shown(progress), place)
        return self._reason(last, progress[last], calls.get(last), now)

    def _reason(self, last: int, phase: str, call: RunningCall | None, now: float) -> str | None:
        """Return the reason to end the start at the time ``now``, or None.

        ``last`` is the rank that is furthest behind, in ``phase`` and ``call``.
        """
        place = f"phase {phase}, in {call}" if call is not None else f"phase {phase}"
        fix = f"{call.fix}, or " if call is not None else ""
        if self._start_limit is not None and now - self._began > self._start_limit:
            return (
                f"rank {last} was not ready after {self._start_limit:.0f} s ({place})\n"
                f"    fix: {fix}wait longer (executor.start_timeout)"
            )
        stall = self._stall_limit
        if _name(phase) in FIRST_PHASES:
            stall = max(stall, SPAWN)
        if now - self._moved <= stall:
            return None
        return (
            f"no rank has made progress for {stall:.0f} s; rank {last} is in {place}\n"
            f"    fix: {fix}wait longer (collectives.timeout, --dist-timeout)"
        )


def _last(progress: Mapping[int, str], calls: Mapping[int, RunningCall]) -> int | None:
    """Return the rank that is furthest behind; None if all have loaded.

    Among ranks of one phase, those that may only wait for others come last.
    """
    slow = [rank for rank, phase in progress.items() if _name(phase) not in LOADED]
    waits = {rank for rank, call in calls.items() if call.waits}
    return min(slow, key=lambda rank: (_order(progress[rank]), rank in waits), default=None)


def _name(phase: str) -> str:
    return phase.partition(" ")[0]


def _order(phase: str) -> tuple[int, int]:
    """Return a key that orders phases with shares by time."""
    name, _, share = phase.partition(" ")
    at = PHASES.index(name) if name in PHASES else 0
    return at, int(share.rstrip("%") or 0)


def shown(progress: Mapping[int, str]) -> str:
    """Return the phases of ranks as text; neighbouring ranks with equal ones share an entry."""
    parts: list[tuple[int, int, str]] = []
    for rank, phase in sorted(progress.items()):
        if parts and parts[-1][1] == rank - 1 and parts[-1][2] == phase:
            parts[-1] = (parts[-1][0], rank, phase)
        else:
            parts.append((rank, rank, phase))
    return ", ".join(
        f"rank {first} {phase}" if first == last else f"ranks {first} to {last} {phase}"
        for first, last, phase in parts
    )
