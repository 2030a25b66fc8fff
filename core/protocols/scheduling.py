"""Protocols of scheduling on the host: prefix cache, policy, and the scheduler that uses both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import Abort, Stats, StepOutput
from glowplug.core.step.pages import PageAllocator, Transfer
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class PrefixMatch:
    """A cached prefix of a prompt.

    Attributes:
        length: number of tokens of the prefix that the KV pool holds.
        pages: pages that hold them.
        handle: the cache's own data.
        away: number of further tokens, in whole pages, that a tier holds (``TieredCache``).
    """

    length: int
    pages: NDArray[np.int32]
    handle: object = None
    away: int = 0


class PrefixCache(Protocol):
    """A store of the pages of finished prefixes, in whole pages; tokens are int32.

    Attributes:
        shares: False: ``match`` never finds anything, so that callers may skip it.
    """

    shares: bool

    def match(self, tokens: NDArray[np.int32], salt: str) -> PrefixMatch:
        """Return the longest cached prefix of ``tokens``, in whole pages.

        Args:
            tokens: int32 [n].
            salt: only prefixes inserted with the same salt are found.
        """
        ...

    def insert(
        self, tokens: NDArray[np.int32], pages: NDArray[np.int32], salt: str
    ) -> NDArray[np.int32]:
        """Store the pages of a prefix, which belong to the cache from then on.

        Args:
            tokens: int32 [n], whole pages.
            pages: pages that hold the tokens.
            salt: see ``match``.

        Returns:
            The pages that the cache did not need; the caller keeps them.
        """
        ...

    def lock(self, match: PrefixMatch, delta: int) -> None:
        """Pin (``delta`` = 1) or unpin (-1) the pages of a match against eviction."""
        ...

    def evict(self, pages: int) -> NDArray[np.int32]:
        """Give up at least ``pages`` pages if possible, beginning with the least recently used.

        Returns:
            The pages given up.
        """
        ...

    def size(self) -> tuple[int, int]:
        """Return (number of pages held, number of these that may be evicted)."""
        ...

    def check_integrity(self) -> None:
        """Check the cache's own data.

        Raises:
            AssertionError: the data are inconsistent; the message has the reason.
        """
        ...


class PageTier(Protocol):
    """The rank's part of a tier: it copies pages. ``core.step.host_tier`` has one for host memory.

    An exception ends the rank.
    """

    def copy(self, transfers: Seq[Transfer]) -> None:
        """Copy pages one transfer after another, as work of the device's current stream.

        It is called before a step's first device work. Earlier steps may still run, and this step
        overwrites pages: a copy on another stream must begin after the present work of the current
        stream, which in turn must wait for the copy.
        """
        ...

    def close(self) -> None:
        """Free the tier's memory or files. Idempotent."""
        ...


class TieredCache(PrefixCache, Protocol):
    """A prefix cache that keeps evicted pages in a tier (``CacheOffers.tier``).

    The tier has ``Sizes.tier_pages`` slots of one page on each rank. Every rank decides alike, and
    copies its own part of a page. ``evict`` and ``insert`` give a page up at once; the copy to its
    slot is among the transfers. These are done before the next step of the rank, so the page may
    have another owner by then.

    ``match`` counts pages in the pool in ``length`` and those behind them in the tier in ``away``.
    ``lock`` pins both. ``size`` counts pages in the pool only.
    """

    def open_tier(self, pages: Mapping[str, Tensor]) -> PageTier:
        """Return the rank's part of the tier. It is called once, when the KV pool exists.

        Args:
            pages: the pool by pages: for each layer and entry, those of drafts included, a view
                uint8 [num_pages, bytes of a page], contiguous. Other state that drafts keep for
                each page (``PageStates``) is among them.
        """
        ...

    def restore(self, match: PrefixMatch, pages: NDArray[np.int32]) -> PrefixMatch:
        """Bring the tokens back that are ``away``; the pages belong to the cache from then on.

        Args:
            match: a locked match.
            pages: one page for each page that is away, int32.

        Returns:
            The whole prefix, with nothing away. It is locked in place of ``match``.
        """
        ...

    def take_transfers(self) -> Seq[Transfer]:
        """Return the transfers decided since the last call, in the order of the decisions."""
        ...

    def tier_size(self) -> int:
        """Return the number of slots in use."""
        ...

    def forget(self) -> None:
        """Empty the tier and drop all transfers. It is called when the pool's part is empty."""
        ...


class SchedulingPolicy(Protocol):
    """An order of admission and preemption, without state.

    The time of all its decisions is ``worker.clock()``, which is the same on every rank and the
    base of ``Sequence.arrival``. Fields that requests have for it (``PolicyOffers.request_fields``)
    are in ``sequence.params.ext``, checked and complete.

    A policy may also have these methods; they are called only if it has them:

    - ``hold(sequence) -> float``: called once, when a sequence arrives. It is not admitted before
      this time of the clock; 0: at once.
    - ``reject(waiting) -> Mapping[int, RequestError]``: called before each step while sequences
      wait. The sequences with these ids end with the error.
    - ``preempts(first, running) -> Sequence | None``: called when the first sequence of ``order``
      does not fit. It returns the running sequence to preempt for it, or None. A sequence that was
      preempted ``MOST_OVERTAKEN`` times is no longer in ``running``.
    """

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        """Return the waiting sequences in the order in which they should be admitted, each once.

        A sequence that is left out is not admitted; when nothing else runs any more, the engine
        ends it with an error that names the policy (code "stalled").

        Args:
            waiting: waiting sequences.
            cached: sequence id -> number of tokens of its prompt in the prefix cache.
        """
        ...

    def victim(self, running: Seq[Sequence]) -> Sequence:
        """Return the running sequence to preempt when no pages are free."""
        ...


MOST_OVERTAKEN = 4  #: preemptions after which a sequence no longer gives way to waiting ones


class DraftPolicy(Protocol):
    """A choice of the size of the drafts in each step, from the results of committed steps.

    The ranks of a group call it alike and choose alike.

    A further method is optional. ``expect(rows, drafts)`` is called with each committed step whose
    result has ``next_drafts``, after ``observe``: for the rows of the step that sampled, int32 [n],
    the number of drafts that each of them has for its next step, int32 [n].

    Attributes:
        clocked: ``took`` is to be called, on all ranks with the same seconds.
    """

    clocked: bool

    def choose(self, rows: NDArray[np.int32], most: int) -> DraftShape:
        """Return the size of the drafts of the next step.

        Args:
            rows: its decoding rows, int32 [n].
            most: number of decoding rows of the largest group of ranks; n without groups.
        """
        ...

    def observe(
        self, rows: NDArray[np.int32], shape: DraftShape, counts: NDArray[np.int32]
    ) -> None:
        """Note the results of a committed step.

        Args:
            rows: decoding rows of the step, int32 [n].
            shape: size of their drafts.
            counts: tokens that each of them gained, int32 [n]: 1 plus the accepted drafts.
        """
        ...

    def took(self, rows: int, shape: DraftShape, seconds: float) -> None:
        """Note the seconds of a step of decoding rows and no others, in all groups of ranks.

        They are those of rank 0, from turn to turn (``Worker.clock``).

        Args:
            rows: number of decoding rows of the largest group.
            shape: size of their drafts.
            seconds: seconds of the step.
        """
        ...

    def forget(self, row: int) -> None:
        """Forget the results of ``row``, which another sequence has entered."""
        ...


class Scheduler(Protocol):
    """The scheduler of a rank's sequences, on the host.

    It is deterministic: every rank runs the same scheduler on the same messages. ``next_batch`` may
    be called before the previous batch has been committed; batches are committed in order.
    """

    def bind(
        self,
        table: SequenceTable,
        pages: PageAllocator,
        cache: PrefixCache,
        policy: SchedulingPolicy,
    ) -> None:
        """Bind the objects that the scheduler uses.

        It is called once, while the rank is built. The scheduler is the only writer of ``table``
        and ``pages``.
        """
        ...

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            QueueFull: the queue is full.
            RequestError: the sequence cannot be served.
        """
        ...

    def abort(self, message: Abort) -> StepOutput | None:
        """End sequences now and free their pages.

        Returns:
            The last outputs of these sequences; None if all ids are unknown.
        """
        ...

    def next_batch(self) -> Batch | None:
        """Return the next step.

        Returns:
            The step; None if there is nothing to launch now. It must not be None when no batch is
            in flight and a sequence waits or runs: after a second of such results, the engine ends
            the sequences with an error that names the scheduler (code "stalled"). It is None in a
            call in which policy or cache has failed for a sequence, which ends with
            ``EnginePlan.failed_call``: ranks compare such faults before the next step.
        """
        ...

    def commit(self, batch: Batch, result: StepResult) -> StepOutput:
        """Add a step's tokens to their sequences, finish sequences and free their pages.

        Results for rows whose epoch has changed since the launch are dropped.
        """
        ...

    def take_pending(self) -> StepOutput | None:
        """Return outputs that arose outside ``commit`` (deadlines that passed), or None.

        Outputs that ``commit`` has returned are not repeated.
        """
        ...

    def load(self) -> Stats:
        """Return the scheduler's present statistics (gauges and counters)."""
        ...

    def flush(self) -> bool:
        """Drop the prefix cache; return False if sequences are running."""
        ...

    def check(self) -> dict[str, int]:
        """Return the number of pages by owner.

        Raises:
            AssertionError: the accounts of pages disagree; the message has the reason.
        """
        ...


class AdaptiveScheduler(Scheduler, Protocol):
    """A scheduler whose steps have drafts of different sizes (``SchedulerOffers.adapts``)."""

    def adapt(self, policy: DraftPolicy) -> None:
        """Have ``policy`` choose ``Batch.draft_shape`` of each step with decoding rows.

        It is called once, after ``bind``, and not at all if all steps have the plan's drafts.
        """
        ...

    def widen(self, batch: Batch, shape: DraftShape) -> None:
        """Enlarge the drafts of the step that ``next_batch`` has just returned.

        It is called if another group of ranks has larger drafts in the same step. The rows have
        pages for the largest drafts of the plan.
        """
        ...
