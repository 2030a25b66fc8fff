"""Who is to blame when ranks fail: what each rank has shown of itself, and the first cause among
what came of it.

When one rank dies, those that wait for it fail a moment later. So whoever watches them reads on for
a moment, and then names a rank that ended, else one that failed by itself, else one that is silent,
else the first that lost a peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from glowplug.core.step.messages import Failed, Outbound, Progress

BEAT = 0.5  #: seconds between a rank's signs of life
QUIET = (
    2.5  #: seconds without one that make a rank (or a host) suspect once others have lost a peer
)
MARGIN = 4.0  #: seconds to name the cause and end everything
SETTLE = 1.0  #: seconds to read on after the first sign of trouble
SPAWN = 30.0  #: seconds a process may take to its first sign of life, whatever the limit
PATIENCE = QUIET + 2 * SETTLE  #: seconds to wait for a silence once ranks have only lost peers
#: phases before the first report of a rank, and after its orderly end
SPAWNING = "spawn"
ENDED = "ended"
LOADED = "ready", "serve", ENDED  #: phases of a rank that has loaded


class Kind(IntEnum):
    """What happened; a smaller one explains a greater one."""

    ENDED = 0  #: a process (or a whole host) has gone without a word
    FAILED = 1  #: a rank reported its own failure
    SILENT = 2  #: no sign of life
    CONSEQUENCE = 3  #: a rank lost a peer


class Trouble(msgspec.Struct, array_like=True, frozen=True):
    """One observation, as a sentence that names rank (or host), phase and reason."""

    kind: int
    text: str
    traceback: str = ""

    def __str__(self) -> str:
        return self.text + (f"\n{self.traceback}" if self.traceback else "")


def first_cause(troubles: Iterable[Trouble]) -> Trouble:
    """The earliest of the kind that explains most."""
    return min(troubles, key=lambda trouble: trouble.kind)


def settled(kind: int, waited: float) -> bool:
    """Has the first cause come to light, ``waited`` seconds after the first trouble? ``kind``: of
    the cause so far.
    """
    return kind == Kind.ENDED or waited > (PATIENCE if kind == Kind.CONSEQUENCE else SETTLE)


def host_limit(timeout: float) -> float:
    """Seconds of silence that end an engine across hosts, so that all is over ``timeout`` seconds
    after a link broke: sooner than the collectives, which know only that a peer is missing."""
    return max(timeout / 2, timeout - MARGIN)


def silence(rank: int, phase: str, seconds: float) -> Trouble:
    return Trouble(Kind.SILENT, f"rank {rank} has been silent for {seconds:.0f} s (phase {phase})")


def not_ready(rank: int, phase: str, seconds: float) -> str:
    return f"rank {rank} was not ready after {seconds:.0f} s (phase {phase})"


@dataclass
class _Seen:
    heard: float
    phase: str = SPAWNING
    gone: bool = False


@dataclass
class Watch:
    """What is known of some ranks. ``limit``: seconds of silence after which a rank counts as hung.

    Attributes:
        troubles: in order of arrival.
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
    def states(self) -> dict[int, tuple[str, float]]:
        """Phase of each rank, and seconds since it was heard."""
        now = self.clock()
        return {rank: (seen.phase, now - seen.heard) for rank, seen in self._seen.items()}

    def heard(self, rank: int, messages: Iterable[Outbound]) -> None:
        """``rank`` lives, and says this."""
        seen = self._seen[rank]
        seen.heard = self.clock()
        for message in messages:
            if isinstance(message, Progress):
                seen.phase = message.phase
            elif isinstance(message, Failed):
                seen.gone = True
                seen.phase = message.phase
                kind = Kind.CONSEQUENCE if message.consequence else Kind.FAILED
                self.troubles.append(
                    Trouble(
                        kind,
                        f"rank {rank} failed in phase {message.phase}: {message.reason}",
                        message.traceback,
                    )
                )

    def ended(self, rank: int, how: str) -> None:
        """The process of ``rank`` has gone; no trouble after an orderly end or a reported failure."""
        seen = self._seen[rank]
        if not seen.gone and seen.phase != ENDED:
            self.troubles.append(
                Trouble(Kind.ENDED, f"rank {rank} ended ({how}) in phase {seen.phase}")
            )
        seen.gone = True

    def all_ended(self) -> bool:
        """Every rank has left its loop because the front has gone or said so."""
        return all(seen.phase == ENDED for seen in self._seen.values())

    def look(self, limit: float | None = None) -> None:
        """Ranks that have been silent for longer than ``limit`` seconds (None: the watch's own)
        become trouble.
        """
        now = self.clock()
        limit = self.limit if limit is None else limit
        quiet = [
            (seen.heard, rank)
            for rank, seen in self._seen.items()
            if not seen.gone
            and seen.phase != ENDED
            and now - seen.heard > (max(limit, SPAWN) if seen.phase == SPAWNING else limit)
        ]
        for heard, rank in sorted(quiet):
            self._seen[rank].gone = True
            self.troubles.append(silence(rank, self.phase(rank), now - heard))
