"""Admission of the continuous scheduler: which waiting sequences get a row and pages now."""

from __future__ import annotations

from collections.abc import Callable

from glowplug.core.protocols import PrefixMatch, SchedulingPolicy
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_queue import CachedPrefixes, Queue
from glowplug.plugins.scheduler.continuous_rows import Ints, Rows

MOST_DEFERRED = 32  #: waiting sequences that may be passed over in one step


class Admission:
    """Admits in the policy's order and stops at the first that does not fit, so that large requests
    are not starved.

    A sequence gets the pages of its whole prompt (and of what is drafted behind it) at once, so
    prefill can never run out of them. While others run, one page for each of them is left over:
    else the next step would take the pages back.

    Args:
        max_rows: sequences that may run together.
        lookahead: tokens that a draft writes behind the prompt, for which there must be pages too.
        share: tokens from which waiting for a like prompt now being computed is worth it; 0: never
            wait.
        scored: tells whether a sequence still wants log-probabilities of its prompt, which a cached
            one has not.
        complain: called with what the policy did wrong, once.
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
        complain: Callable[[str], None],
    ) -> None:
        self.rows = rows
        self.queue = queue
        self.policy = policy
        self.max_rows = max_rows
        self.context = context
        self.lookahead = lookahead
        self.share = share
        self.scored = scored
        self.complain = complain
        self.queries = self.hits = 0
        self._blocked = False
        self._waits_for: dict[
            int, int
        ] = {}  # waiting id -> the running id whose prompt it waits for

    def retry(self) -> None:
        """Something has changed (a page, a row, a new sequence): what did not fit may fit now."""
        self._blocked = False

    def forget(self, id: int) -> None:
        """The sequence has left the queue."""
        self._waits_for.pop(id, None)

    def admit(self, budget: int) -> list[Sequence]:
        """Move waiting sequences into rows until ``budget`` prefill tokens are spoken for. Returns
        them.
        """
        admitted: list[Sequence] = []
        if (
            self._blocked
            or not len(self.queue)
            or budget <= 0
            or len(self.rows.running) >= self.max_rows
        ):
            return admitted
        waiting = self.queue.sequences()
        deferred = 0
        for sequence in self.policy.order(waiting, CachedPrefixes(waiting, self.rows.cache)):
            if budget <= 0 or len(self.rows.running) >= self.max_rows or deferred >= MOST_DEFERRED:
                break
            if self.queue.get(getattr(sequence, "id", -1)) is not sequence:
                self.complain(
                    f"returned a {type(sequence).__name__} that is not waiting: it is passed over"
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
            admitted.append(sequence)
            budget -= len(tokens) - match.length
        return admitted

    def looks_up(self, sequence: Sequence) -> bool:
        """May a cached prefix of ``sequence`` be used?"""
        return self.rows.cache.shares and not self.scored(sequence)

    def _match(self, sequence: Sequence, tokens: Ints) -> PrefixMatch:
        """The cached prefix; at least one token is left to compute, for its logits."""
        if not self.looks_up(sequence):
            return PrefixMatch(0, tokens[:0])
        return self.rows.cache.match(tokens[:-1], sequence.salt)

    def _is_deferred(self, sequence: Sequence, tokens: Ints, match: PrefixMatch) -> bool:
        """Is it better to wait for another row's prompt? That row is computing, so the wait ends by
        itself.

        A sequence waits for one other at most: a cache too small to keep the prompt would line them
        all up.
        """
        if not self.share or not self.rows.unpublished or self.scored(sequence):
            return False
        other, common = self.rows.twin(tokens, sequence.salt)
        if common - match.length < self.share:
            return False
        return self._waits_for.setdefault(sequence.id, other) == other

    def _try(self, sequence: Sequence, tokens: Ints, match: PrefixMatch) -> bool:
        if self._place(sequence, tokens, match):
            self.queries += self.looks_up(sequence)
            self.hits += match.length > 0
            return True
        # NOTE: a cache that pins more than the match could keep the only sequence out for ever;
        # without it, it fits.
        if self.rows.running or not match.length:
            return False
        return self._place(sequence, tokens, PrefixMatch(0, tokens[:0]))

    def _place(self, sequence: Sequence, tokens: Ints, match: PrefixMatch) -> bool:
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
            rows.join(sequence, match, fresh, self.context)
            return True
        rows.cache.lock(match, -1)
        return False
