"""The queue of the continuous scheduler, its deadlines, and look-ups of cached prefixes."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from glowplug.core.errors import ComponentFailed
from glowplug.core.protocols import PrefixCache
from glowplug.core.step.request import Sequence

#: kinds of deadline, which are also the error codes
QUEUED = "queue_timeout"
TOTAL = "timeout"


class Queue:
    """The waiting sequences in order: preempted ones first, then by arrival.

    All operations are O(1) or O(log n).

    Attributes:
        tokens: tokens to compute for the waiting sequences, without those expected to be cached.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._deadlines: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id: int) -> bool:
        return id in self._waiting

    def get(self, id: int) -> Sequence | None:
        return self._waiting.get(id)

    def sequences(self) -> list[Sequence]:
        return list(self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        """Add a sequence at the end of the queue, and record its deadlines."""
        self._waiting[sequence.id] = sequence
        self.tokens += _uncached(sequence)
        limits = sequence.admission
        for seconds, kind in ((limits.queue_timeout, QUEUED), (limits.timeout, TOTAL)):
            if seconds > 0:
                heapq.heappush(self._deadlines, (sequence.arrival + seconds, sequence.id, kind))

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head of the queue."""
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)
        self.tokens += _uncached(sequence)

    def pop(self, id: int) -> Sequence | None:
        sequence = self._waiting.pop(id, None)
        if sequence is not None:
            self.tokens -= _uncached(sequence)
        return sequence

    def overdue(self, now: float) -> Iterator[tuple[int, str]]:
        """Yield (sequence id, kind of deadline) for every deadline that has passed, each once.

        The sequence may have ended before its deadline.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id, kind = heapq.heappop(self._deadlines)
            yield id, kind


def _uncached(sequence: Sequence) -> int:
    """Return the number of tokens to compute for a waiting sequence, as far as is known."""
    return len(sequence.prompt) + len(sequence.output) - sequence.expected_cached


class CachedPrefixes(Mapping[int, int]):
    """A mapping from the id of a waiting sequence to its number of cached prompt tokens.

    The cache is searched for a sequence only when the policy reads the sequence's entry.

    Args:
        waiting: the waiting sequences.
        cache: the cache.
        error_of: the error for a slot, a method of its component and the exception of a call.
    """

    def __init__(
        self,
        waiting: list[Sequence],
        cache: PrefixCache,
        error_of: Callable[[str, str, Exception], ComponentFailed],
    ) -> None:
        self._waiting = {sequence.id: sequence for sequence in waiting}
        self._cache = cache
        self._error_of = error_of

    def __getitem__(self, id: int) -> int:
        sequence = self._waiting[id]
        try:
            match = self._cache.match(sequence.prompt, sequence.admission.salt)
        except Exception as error:
            raise self._error_of("cache", "match", error) from error
        return match.length + match.away

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)
