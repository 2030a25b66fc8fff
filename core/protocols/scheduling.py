"""Scheduling on the host: the prefix cache, the policy, and the scheduler that uses both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import Abort, Stats, StepOutput
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable


@dataclass(eq=False)
class PrefixMatch:
    """``length`` tokens found in ``pages``; ``handle`` is the cache's own."""

    length: int
    pages: NDArray[np.int32]
    handle: object = None


class PrefixCache(Protocol):
    """Remembers the pages of finished prefixes. Works in whole pages; tokens int32."""

    shares: bool  #: False: ``match`` never finds anything, so callers may spare themselves the work

    def match(self, tokens: NDArray[np.int32], salt: str) -> PrefixMatch:
        """Longest cached prefix of ``tokens`` (whole pages) under ``salt``."""
        ...

    def insert(
        self, tokens: NDArray[np.int32], pages: NDArray[np.int32], salt: str
    ) -> NDArray[np.int32]:
        """Take ownership of ``pages`` (covering ``tokens``, whole pages). Returns the pages it did
        not need.
        """
        ...

    def lock(self, match: PrefixMatch, delta: int) -> None:
        """Pin (+1) or unpin (-1) a match against eviction."""
        ...

    def evict(self, pages: int) -> NDArray[np.int32]:
        """Give up at least ``pages`` pages if possible, least recently used leaves first. Returns
        them.
        """
        ...

    def size(self) -> tuple[int, int]:
        """(pages held, pages evictable)."""
        ...

    def check_integrity(self) -> None:
        """AssertionError with what is wrong."""
        ...


class SchedulingPolicy(Protocol):
    """Pure choices; no state of its own."""

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        """Waiting sequences in the order they should be admitted. ``cached``: id -> prefix-cache
        tokens.

        Returns each of ``waiting`` once. A sequence that is left out is not admitted; when nothing
        else runs any more, the engine ends it with an error that names the policy (code "stalled").
        """
        ...

    def victim(self, running: Seq[Sequence]) -> Sequence:
        """Which running sequence loses its pages when none are free."""
        ...


class Scheduler(Protocol):
    """Host only; deterministic: every rank runs the same one on the same messages.

    ``next_batch`` may be called before the batch before has been committed; batches are committed
    in order.
    """

    def bind(
        self,
        table: SequenceTable,
        pages: PageAllocator,
        cache: PrefixCache,
        policy: SchedulingPolicy,
    ) -> None:
        """Called once, while the rank is assembled. The scheduler is the only writer of ``table``
        and ``pages``.
        """
        ...

    def add(self, sequence: Sequence) -> None:
        """Queue it. QueueFull or RequestError when it may not enter."""
        ...

    def abort(self, message: Abort) -> StepOutput | None:
        """End sequences now, freeing their pages; None when all ids were unknown."""
        ...

    def next_batch(self) -> Batch | None:
        """The next step. None: nothing to do, or nothing before the batches in flight are
        committed.

        With no batch in flight and a sequence waiting or running it is not None. The engine
        tolerates None for a second then, and ends the sequences with an error that names the
        scheduler (code "stalled").
        """
        ...

    def commit(self, batch: Batch, result: StepResult) -> StepOutput:
        """Take in a step's tokens: append, finish, free. Stale rows are dropped."""
        ...

    def take_pending(self) -> StepOutput | None:
        """What happened outside ``commit`` (deadlines passed) and has not been reported by one;
        None: nothing.
        """
        ...

    def load(self) -> Stats: ...

    def flush(self) -> bool:
        """Drop the prefix cache; False when sequences are running."""
        ...

    def check(self) -> dict[str, int]:
        """Page accounting by owner; AssertionError with what is wrong."""
        ...
