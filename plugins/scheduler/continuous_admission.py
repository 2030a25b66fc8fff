"""Admission of the continuous scheduler: moves waiting sequences into rows and gives them pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from glowplug.core.protocols import PrefixMatch, SchedulingPolicy, TieredCache
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_queue import CachedPrefixes, Queue
from glowplug.plugins.scheduler.continuous_rows import Ints, Rows

MOST_DEFERRED = 32  #: most waiting sequences that are passed over in one step


class Admitter:
    """Moves waiting sequences into rows of the running batch, in the policy's order.

    Admission stops at the first sequence that does not fit, so that large requests are not starved.

    A sequence gets the pages of its whole prompt (and of the draft tokens after the prompt) at
    once, so prefill never runs out of pages. While other sequences run, one page for each of them
    stays free: otherwise the next step would have to preempt the new sequence.

    Args:
        rows: the running sequences and their pages.
        queue: the waiting sequences.
        policy: gives the order of admission.
        max_rows: most sequences that may run together.
        context: context length, in tokens.
        lookahead: number of tokens that a draft writes after the prompt, which need pages too.
        share: a sequence waits for a prompt that is being computed if at least this number of
            their first tokens are equal; 0: never wait.
        scored: returns True for a sequence that still needs log-probabilities of its prompt, which
            are not available for a cached prefix.
        clock: the time of ``Sequence.held_until``.
    """

    def __init__(
        self,
        rows: Rows,
        queue: Queue,
        policy: SchedulingPolicy,
        *,
        max_rows: int,
        context: int,
        lookahead: int,
        share: int,
        scored: Callable[[Sequence], bool],
        clock: Callable[[], float],
    ) -> None:
        self.rows = rows
        self.queue = queue
        self.policy = policy
        self.max_rows = max_rows
        self.context = context
        self.lookahead = lookahead
        self.share = share
        self.scored = scored
        self.clock = clock
        self.held: set[int] = set()  # ids of sequences that the policy may hold
        self.queries = 0
        self.hits = 0
        self.tier_hits = 0
        self.tier_hit_tokens = 0
        self._blocked = False
        # id of a waiting sequence -> id of the running sequence whose prompt it waits for
        self._waits_for: dict[int, int] = {}

    def retry(self) -> None:
        """Let ``admit`` try again, because a page or row became free or a sequence arrived."""
        self._blocked = False

    def forget(self, id: int) -> None:
        """Remove the state kept for sequence ``id``, which has left the queue."""
        self._waits_for.pop(id, None)
        self.held.discard(id)

    def stuck(self) -> bool:
        """Return True if a sequence waits for a row or for pages."""
        full = len(self.rows.running) >= self.max_rows
        return bool(len(self.queue)) and (self._blocked or full)

    def ordered(self) -> list[Sequence]:
        """Return the waiting sequences that are not held, in the policy's order."""
        waiting = self.queue.sequences()
        if self.held:
            now = self.clock()
            waiting = [sequence for sequence in waiting if sequence.held_until <= now]
        if not waiting:
            return []
        faults = self.rows.faults
        cached = CachedPrefixes(waiting, self.rows.cache, faults.error)
        try:
            return self.policy.order(waiting, cached)
        except Exception as error:
            alone = partial(self.policy.order, cached=cached)
            raise faults.note_some(waiting, "order", error, alone) from error

    def admit(self, budget: int) -> Iterator[Sequence]:
        """Move waiting sequences into rows until ``budget`` prefill tokens are used; yield each.

        Raises:
            SequencesFailed: a call of policy or cache has failed.
        """
        if (
            (self._blocked and not self.held)
            or not len(self.queue)
            or budget <= 0
            or len(self.rows.running) >= self.max_rows
        ):
            return
        deferred = 0
        for sequence in self.ordered():
            if budget <= 0 or len(self.rows.running) >= self.max_rows or deferred >= MOST_DEFERRED:
                break
            if self.queue.get(getattr(sequence, "id", -1)) is not sequence:
                self.rows.faults.complain(
                    f"returned a {type(sequence).__name__} that is not waiting: it is skipped"
                )
                continue
            tokens = sequence.all_tokens()
            match = self._match(sequence, tokens)
            if self._is_deferred(sequence, tokens, match):
                deferred += 1
                continue
            if not self._try(sequence, tokens, match):
                self._blocked = True
                break
            self.queue.pop(sequence.id)
            self.forget(sequence.id)
            yield sequence
            budget -= len(tokens) - match.length - match.away

    def looks_up(self, sequence: Sequence) -> bool:
        """Return True if a cached prefix of ``sequence`` may be used."""
        return self.rows.cache.shares and not self.scored(sequence)

    def _match(self, sequence: Sequence, tokens: Ints) -> PrefixMatch:
        """Return the longest cached prefix of ``tokens`` without the last token.

        The last token is always computed, because the step needs its logits.
        """
        if not self.looks_up(sequence):
            return PrefixMatch(0, tokens[:0])
        try:
            return self.rows.cache.match(tokens[:-1], sequence.admission.salt)
        except Exception as error:
            raise self.rows.faults.note(sequence, "cache", "match", error) from error

    def _is_deferred(self, sequence: Sequence, tokens: Ints, match: PrefixMatch) -> bool:
        """Return True if a sequence should wait until the similar prompt of a row is cached.

        That row is computing its prompt now, so the wait ends by itself. A sequence waits for one
        other sequence at most. Otherwise, if the cache were too small to keep the prompt, all
        sequences with this prompt would wait one after another.
        """
        if not self.share or not self.rows.unpublished or self.scored(sequence):
            return False
        other, common = self.rows.twin(tokens, sequence.admission.salt)
        if common - match.length - match.away < self.share:
            return False
        return self._waits_for.setdefault(sequence.id, other) == other

    def _try(self, sequence: Sequence, tokens: Ints, match: PrefixMatch) -> bool:
        if self._place(sequence, tokens, match):
            self.queries += self.looks_up(sequence)
            self.hits += match.length + match.away > 0
            return True
        # NOTE: if locking the match pinned more pages than the match has, the only sequence might
        # never fit. Without the match it fits.
        if self.rows.running or not match.length + match.away:
            return False
        return self._place(sequence, tokens, PrefixMatch(0, tokens[:0]))

    def _place(self, sequence: Sequence, tokens: Ints, match: PrefixMatch) -> bool:
        """Give a sequence a row and pages. Return False, and change nothing, if it does not fit."""
        rows = self.rows
        rows.cache.lock(match, 1)
        stored = max(
            len(tokens),
            min(len(tokens) + self.lookahead, sequence.max_length - 1, self.context - 1),
        )
        needed = rows.pages_for(stored) - len(match.pages)
        available = rows.pages.free + rows.cache.size()[1]
        if needed + len(rows.running) <= available and rows.make_free(needed):
            fresh = rows.pages.take(needed)
            assert fresh is not None
            if match.away:
                match, fresh = self._restore(match, fresh)
            rows.join(sequence, match, fresh, self.context)
            return True
        rows.cache.lock(match, -1)
        return False

    def _restore(self, match: PrefixMatch, fresh: Ints) -> tuple[PrefixMatch, Ints]:
        """Bring the pages of a locked match that are away back to the first of ``fresh``.

        Returns:
            The whole prefix, and the fresh pages behind it.
        """
        count = self.rows.pages_for(match.away)
        self.tier_hits += 1
        self.tier_hit_tokens += match.away
        cache = cast(TieredCache, self.rows.cache)
        return cache.restore(match, fresh[:count]), fresh[count:]
