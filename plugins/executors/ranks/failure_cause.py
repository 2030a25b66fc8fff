"""The first cause when ranks fail, from the observed state of each rank.

When one rank dies, the ranks that wait for it fail a moment later. An executor therefore goes on
reading for a moment, and then reports a rank that ended, else a rank that failed by itself, else a
silent rank, else a live rank whose loop stands still, else the first rank that lost a peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from glowplug.core.step.messages import Failed, Outbound, Progress, RunningCall

BEAT = 0.5  #: seconds between two heartbeats of a rank
#: seconds without a heartbeat after which a rank (or a host) counts as silent once others have lost
#: a peer
QUIET = 2.5
MARGIN = 4.0  #: seconds reserved for reporting the cause and ending all ranks
SETTLE = 1.0  #: seconds to go on reading after the first trouble
#: seconds a process may take until its first heartbeat, even if the limit is shorter
SPAWN = 30.0
#: seconds to wait for a rank to count as silent while the only troubles are lost peers and loops
#: that stand still
PATIENCE = QUIET + 2 * SETTLE
SPAWNING = "spawn"  #: phase of a rank before its first report
ENDED = "ended"  #: phase of a rank after its orderly end
LOADED = "ready", "serve", ENDED  #: phases of a rank that has loaded


class FailureKind(IntEnum):
    """The kinds of failure, ordered so that a smaller kind may be the cause of a greater one."""

    ENDED = 0  #: a process (or a whole host) has gone without a report
    FAILED = 1  #: a rank reported its own failure
    SILENT = 2  #: no heartbeat
    STUCK = 3  #: heartbeats, but the loop stands still: perhaps it waits for a silent rank
    CONSEQUENCE = 4  #: a rank lost a peer, or waits for one


class Trouble(msgspec.Struct, array_like=True, frozen=True):
    """One observed failure, as a sentence that names rank (or host), phase and reason."""

    kind: int
    text: str
    traceback: str = ""

    def __str__(self) -> str:
        return self.text + (f"\n{self.traceback}" if self.traceback else "")


def first_cause(troubles: Iterable[Trouble]) -> Trouble:
    """Return the earliest failure of the smallest kind, which may be the cause of the others."""
    return min(troubles, key=lambda trouble: trouble.kind)


def settled(kind: int, waited: float) -> bool:
    """Return True if an executor has waited long enough for reports of an earlier cause.

    Args:
        kind: kind of the first cause so far.
        waited: seconds since the first failure was observed.
    """
    return kind == FailureKind.ENDED or waited > (PATIENCE if kind >= FailureKind.STUCK else SETTLE)


def host_limit(timeout: float) -> float:
    """Return how many seconds a host or rank may be silent before an engine on several hosts ends.

    With this limit the engine ends before the collectives time out. Their error would state only
    that a peer is missing.

    Args:
        timeout: timeout of the collectives, in seconds.
    """
    return max(timeout / 2, timeout - MARGIN)


def silence(rank: int, phase: str, seconds: float) -> Trouble:
    return Trouble(
        FailureKind.SILENT, f"rank {rank} has been silent for {seconds:.0f} s (phase {phase})"
    )


@dataclass
class _Seen:
    """The observed state of one rank.

    Attributes:
        last_message: time of the last message.
        phase: phase of the last report.
        share: its completed share in percent; None: not reported.
        gone: it has ended, failed or been reported as silent.
        call: the call of a plugin's code in which it loads, as of its last message.
    """

    last_message: float
    phase: str = SPAWNING
    share: int | None = None
    gone: bool = False
    call: RunningCall | None = None


@dataclass
class Watch:
    """The observed state of an executor's ranks, and their failures.

    Attributes:
        ranks: the ranks watched.
        limit: seconds of silence after which a rank counts as hung.
        clock: source of monotonic time, in seconds.
        troubles: the failures observed, in order of arrival.
    """

    ranks: Sequence[int]
    limit: float
    clock: Callable[[], float] = time.monotonic
    troubles: list[Trouble] = field(default_factory=list)

    def __post_init__(self) -> None:
        now = self.clock()
        self._seen = {rank: _Seen(now) for rank in self.ranks}

    def phase(self, rank: int) -> str:
        return self._seen[rank].phase

    @property
    def phases(self) -> dict[int, str]:
        return {rank: seen.phase for rank, seen in self._seen.items()}

    @property
    def progress(self) -> dict[int, str]:
        """The phase of each rank, with its completed share if it has one: "weights 41%"."""
        return {
            rank: seen.phase if seen.share is None else f"{seen.phase} {seen.share}%"
            for rank, seen in self._seen.items()
        }

    @property
    def calls(self) -> dict[int, RunningCall]:
        """The call of a plugin's code in which each loading rank is; other ranks are left out."""
        return {rank: seen.call for rank, seen in self._seen.items() if seen.call is not None}

    @property
    def states(self) -> dict[int, tuple[str, float]]:
        """(phase with its share, seconds since the last message) of each rank."""
        now = self.clock()
        shown = self.progress
        return {rank: (shown[rank], now - seen.last_message) for rank, seen in self._seen.items()}

    def received(self, rank: int, messages: Iterable[Outbound]) -> None:
        """Record messages of ``rank``; the call itself shows that the rank is alive."""
        seen = self._seen[rank]
        seen.last_message = self.clock()
        for message in messages:
            if isinstance(message, Progress):
                if message.total > 1:
                    seen.share = 100 * message.done // message.total
                elif message.phase != seen.phase:
                    seen.share = None
                seen.phase = message.phase
                seen.call = message.call
            elif isinstance(message, Failed):
                seen.gone = True
                seen.phase = message.phase
                kind = FailureKind.STUCK if message.stuck else FailureKind.FAILED
                if message.consequence:
                    kind = FailureKind.CONSEQUENCE
                self.troubles.append(
                    Trouble(
                        kind,
                        f"rank {rank} failed in phase {message.phase}: {message.reason}",
                        message.traceback,
                    )
                )

    def ended(self, rank: int, how: str) -> None:
        """Record that the process of ``rank`` has ended.

        The end counts as a failure unless the rank left its loop or reported a failure before.

        Args:
            rank: the rank.
            how: how the process ended, for the message.
        """
        seen = self._seen[rank]
        if not seen.gone and seen.phase != ENDED:
            self.troubles.append(
                Trouble(FailureKind.ENDED, f"rank {rank} ended ({how}) in phase {seen.phase}")
            )
        seen.gone = True

    def all_ended(self) -> bool:
        """Return True if every rank has left its loop in an orderly way.

        Ranks leave their loop when the front end has gone or has stopped the engine.
        """
        return all(seen.phase == ENDED for seen in self._seen.values())

    def look(self, limit: float | None = None) -> None:
        """Record a failure for each rank that has been silent for longer than ``limit`` seconds.

        Args:
            limit: seconds; None: the limit of this watch.
        """
        now = self.clock()
        limit = self.limit if limit is None else limit
        silent = [
            (seen.last_message, rank)
            for rank, seen in self._seen.items()
            if not seen.gone
            and seen.phase != ENDED
            and now - seen.last_message > (max(limit, SPAWN) if seen.phase == SPAWNING else limit)
        ]
        for last, rank in sorted(silent):
            self._seen[rank].gone = True
            self.troubles.append(silence(rank, self.phase(rank), now - last))
