"""The decoding rows of a step of the continuous scheduler: their drafts, pages and launch.

All decoding rows of a step compute the same number of tokens. With a policy, this number may differ
from step to step; several steps of different sizes may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from glowplug.core.plan.plan import Sizes
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import DraftPolicy
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.pages import PageAllocator
from glowplug.plugins.scheduler import continuous_batch
from glowplug.plugins.scheduler.continuous_commit import Committed
from glowplug.plugins.scheduler.continuous_rows import Ints, Rows

NO_ROWS: Ints = np.zeros(0, np.int32)


class _Timed(NamedTuple):
    """A committed step of decoding rows alone, in all groups of ranks.

    Attributes:
        began: time at which the turn of its commit began.
        rows: most decoding rows of any group.
        shape: size of their drafts.
    """

    began: float
    rows: int
    shape: DraftShape


class Decodes:
    """The decoding rows of the next step.

    Args:
        rows: the running sequences.
        pages: the KV pool's pages.
        sizes: the plan's sizes.
        clock: the ranks' common time, which each turn sets.

    Attributes:
        policy: chooses the size of the drafts of each step; None: always the plan's.
        members: the decoding rows of the next step, int32.
        shape: size of their drafts.
    """

    def __init__(
        self, rows: Rows, pages: PageAllocator, sizes: Sizes, clock: Callable[[], float]
    ) -> None:
        self.policy: DraftPolicy | None = None
        self.members = NO_ROWS
        self.shape = self._largest = sizes.step_shapes[-1]
        self._rows = rows
        self._pages = pages
        self._sizes = sizes
        self._most = sizes.context_length + sizes.width
        self._clock = clock
        self._timed: _Timed | None = None  # the last committed step, if it counts
        self._other_groups = 0  # most decoding rows of any group in the last committed step

    @property
    def tokens(self) -> int:
        """Most tokens that the members compute in the next step.

        Groups of ranks may have to widen it later to the largest drafts.
        """
        return len(self.members) * self._reserved.tokens

    @property
    def _reserved(self) -> DraftShape:
        """Largest size of the drafts that the next step may get."""
        return self._largest if self._sizes.groups > 1 else self.shape

    def clear(self) -> None:
        """Let the next step have no decoding rows."""
        self.members = NO_ROWS

    def reserve(self) -> bool:
        """Choose the members and the size of their drafts, and reserve their pages.

        Groups of ranks may have to widen the step later, so they reserve pages for the largest
        drafts.

        Returns:
            False if there are not enough pages.
        """
        self.members = continuous_batch.launchable(self._rows)
        self._choose()
        needed = continuous_batch.needed_tokens(
            self._rows, self.members, self._reserved, self._sizes.lookahead
        )
        short, counts = self._rows.lacking(self.members, needed)
        if not len(short):
            return True
        wanted = int(counts.sum())
        if not self._rows.make_free(wanted):
            return False
        fresh = self._pages.take(wanted)
        assert fresh is not None
        self._rows.grow(short, counts, fresh)
        return True

    def _choose(self) -> None:
        if self.policy is not None and len(self.members):
            most = max(len(self.members), self._other_groups)
            self.shape = self.policy.choose(self.members, most)

    def launch(self) -> Ints:
        """Count the next step as launched, and return the members' KV lengths after it, int32."""
        most = None if self._sizes.width == 1 else self._most
        return continuous_batch.launch_decodes(self._rows, self.members, self.shape.tokens, most)

    def launched(self, batch: Batch) -> None:
        """Set the size of the drafts of ``batch``, and forget the rows' former sequences."""
        if self.policy is None:
            return
        if batch.num_decodes:
            batch.draft_shape = self.shape
        for sequence in batch.joined:
            if sequence.row >= 0:
                self.policy.forget(sequence.row)

    def widen(self, batch: Batch, shape: DraftShape) -> None:
        """Enlarge the drafts of a step that has not run yet; see ``AdaptiveScheduler.widen``."""
        decodes = batch.num_decodes
        more = np.int32(shape.tokens - int(batch.query_lens[0]))
        table = self._rows.table
        table.launched[batch.rows[:decodes]] += more
        batch.query_lens[:decodes] = shape.tokens
        batch.kv_lens[:decodes] = np.minimum(batch.kv_lens[:decodes] + more, self._most)
        longest = self._rows.pages_for(int(batch.kv_lens.max()) + self._sizes.lookahead)
        batch.pages = table.pages[batch.rows, :longest]
        batch.draft_shape = shape
        if batch.mode is Mode.DECODE:
            batch.mode = Mode.VERIFY

    def committed(self, batch: Batch, done: Committed, result: StepResult) -> None:
        """Report the tokens that the decoding rows of a step gained to the policy.

        So are the drafts that the rows have for their next steps, if they are known.
        """
        if self.policy is None:
            return
        if batch.agreed is not None:
            self._other_groups = batch.agreed.decodes
        if self.policy.clocked:
            self._time(batch, self.policy)
        decodes = int(np.searchsorted(done.at, batch.num_decodes))
        if decodes and batch.draft_shape is not None:
            self.policy.observe(done.rows[:decodes], batch.draft_shape, done.given[:decodes])
        ahead = result.next_drafts
        if ahead is not None and hasattr(self.policy, "expect"):
            self.policy.expect(done.rows, ahead[done.at])

    def _time(self, batch: Batch, policy: DraftPolicy) -> None:
        """Report the seconds of the step before ``batch`` if the rows of both steps all decoded.

        The turn that commits a step lasts as long as the step: it waits for the step's results, and
        began when those of the step before had come. Its seconds are known at the next commit.
        """
        now = self._clock()
        before = self._timed
        self._timed = None
        agreed = batch.agreed
        if batch.draft_shape is None or batch.num_decodes < len(batch.rows):
            return
        if agreed is not None and agreed.mode is Mode.PREFILL:
            return
        # turns of a test may share one time
        if before is not None and now > before.began:
            policy.took(before.rows, before.shape, now - before.began)
        rows = batch.num_decodes if agreed is None else agreed.decodes
        self._timed = _Timed(now, rows, batch.draft_shape)
