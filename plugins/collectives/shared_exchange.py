"""Exchange of small host data between the ranks of one host, through shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from glowplug.plugins.collectives.shared_words import (
    FIRST,
    NUMBERS,
    SharedWords,
    following,
    read,
    write,
)

VALUES_MAX = 16  #: most values of 64 bits that a rank gives to ``gather``
#: words of a broadcast: its length, then 4 bytes in each. NOTE: at most 2 KiB, which libc copies by
#: loads and stores of whole words.
BROADCAST_WORDS = 256
BROADCAST_BYTES = 4 * (BROADCAST_WORDS - 1)  #: most bytes of a broadcast
RING = 8  #: broadcasts that rank 0 may be ahead of the slowest rank
LINE = 8  #: words of a cache line
NOTHING = np.zeros(1, np.uint32)  #: data of a word of which only the number counts
SPIN_SECONDS = 200e-6  #: seconds to look for a peer's words before sleeping
SLEEP_SECONDS = 0.02  #: longest sleep until peers are checked to be there

Gone = Callable[[], int | None]


class MissingPeer(Exception):
    """A rank whose data have not arrived.

    Attributes:
        rank: the rank.
        ended: it has ended; False: it has not answered in time.
    """

    def __init__(self, rank: int, ended: bool) -> None:
        super().__init__(rank, ended)
        self.rank = rank
        self.ended = ended


class Look(NamedTuple):
    """The state of awaited words.

    Attributes:
        found: the data, uint32; None: not all of them are there.
        rank: a rank whose data are missing.
        word: word in which its data will arrive.
        number: number of the exchange in that word.
    """

    found: NDArray[np.uint32] | None
    rank: int = 0
    word: int = 0
    number: int = 0


def words_of(ranks: int) -> int:
    """Return the number of shared words that ``ranks`` ranks need."""
    return 2 * ranks * 2 * VALUES_MAX + RING * BROADCAST_WORDS + (ranks + 1) * LINE


class SharedExchange:
    """A rank's part of the exchange through shared memory.

    Every rank must call the same methods in the same order.

    Args:
        shared: the shared words, ``words_of(ranks)`` in number.
        rank: this rank.
        ranks: number of ranks.
        timeout: seconds to wait for another rank.
        gone: returns the number of a rank that has ended, or None.

    Raises:
        MissingPeer: another rank has ended or has not answered in time; the methods raise it.
    """

    def __init__(
        self, shared: SharedWords, rank: int, ranks: int, timeout: float, gone: Gone
    ) -> None:
        self._shared = shared
        self._rank = rank
        self._timeout = timeout
        self._gone = gone
        width = 2 * VALUES_MAX
        ring = 2 * ranks * width
        seen = ring + RING * BROADCAST_WORDS
        complete = seen + ranks * LINE
        words = shared.words
        #: the values of each rank, in turn for odd and even exchanges: a rank writes again only
        #: after the exchange between, which it could leave after every rank had read
        self._values = words[:ring].reshape(2, ranks, width)
        self._ring = words[ring:seen].reshape(RING, BROADCAST_WORDS)
        #: one word of each rank: the number of the last broadcast that it has read
        self._seen = words[seen:complete:LINE]
        self._seen_word = seen
        #: one word: the number of the last gather that rank 0 has found complete. Other ranks sleep
        #: until it changes, so that each wakes once and not for every rank.
        self._complete = words[complete : complete + 1]
        self._complete_word = complete
        self._gathers = FIRST - 1
        self._broadcasts = FIRST - 1
        self._room = RING  # broadcasts until rank 0 looks again which ones the ranks have read

    def gather(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ``values``, int64 [N], of every rank as one array, int64 [ranks, N]."""
        number = self._gathers = following(self._gathers)
        count = 2 * len(values)
        own = self._values[number % 2, self._rank, :count]
        write(own, np.ascontiguousarray(values).view(np.uint32), number)
        if self._rank:
            self._shared.wake(self._value_word(number, self._rank, count))
        found = self._await(partial(self._look_at_values, number, count))
        if self._rank == 0:
            write(self._complete, NOTHING, number)
            self._shared.wake(self._complete_word)
        return found.view(np.int64)

    def _value_word(self, number: int, rank: int, count: int) -> int:
        """Return the index of the last of ``count`` words of a rank's values in an exchange."""
        _, ranks, width = self._values.shape
        return (number % 2 * ranks + rank) * width + count - 1

    def _look_at_values(self, number: int, count: int) -> Look:
        """Look for ``count`` words of every rank. Other ranks than rank 0 sleep by one word."""
        data, numbers = read(self._values[number % 2, :, :count])
        late = numbers != number
        if not late.any():
            return Look(np.ascontiguousarray(data))
        rank = int(late.any(axis=1).argmax())
        if self._rank:
            return Look(None, rank, self._complete_word, int(read(self._complete)[1][0]))
        return Look(None, rank, self._value_word(number, rank, count), int(numbers[rank, -1]))

    def send(self, data: bytes) -> bool:
        """Broadcast ``data`` from rank 0.

        Returns:
            False if ``data`` is too long. Then every rank has read so, and rank 0 must send the
            data in another way.
        """
        number = self._broadcasts = following(self._broadcasts)
        if not self._room:
            behind = number - self._await(self._look_for_room).astype(np.int64)
            self._room = 1 + RING - int((behind % NUMBERS).max())
        self._room -= 1
        inline = len(data) <= BROADCAST_BYTES
        content = data + bytes(-len(data) % 4) if inline else b""
        words = np.array([len(data), *np.frombuffer(content, np.uint32)], np.uint32)
        write(self._ring[number % RING, : len(words)], words, number)
        self._shared.wake(self._ring_word(number))
        return inline

    def receive(self) -> bytes | None:
        """Return the bytes that rank 0 broadcasts; None: they are too long and come otherwise."""
        number = self._broadcasts = following(self._broadcasts)
        found = self._await(partial(self._look_at_broadcast, number))
        write(self._seen[self._rank : self._rank + 1], NOTHING, number)
        self._shared.wake(self._seen_word + self._rank * LINE)
        size = int(found[0])
        return found[1:].tobytes()[:size] if size <= BROADCAST_BYTES else None

    def _ring_word(self, number: int) -> int:
        """Return the index of the first word of a broadcast."""
        return self._values.size + number % RING * BROADCAST_WORDS

    def _look_at_broadcast(self, number: int) -> Look:
        """Look for the words of a broadcast: the number of its bytes, and then these."""
        place = self._ring[number % RING]
        head, numbers = read(place[:1])
        word = self._ring_word(number)
        if numbers[0] != number:
            return Look(None, 0, word, int(numbers[0]))
        size = int(head[0])
        data, numbers = read(place[: 1 + -(-size // 4) if size <= BROADCAST_BYTES else 1])
        return Look(None if (numbers != number).any() else data, 0, word, number)

    def _look_for_room(self) -> Look:
        """Look whether every rank has read the broadcast whose place the next one takes."""
        _, numbers = read(self._seen[1:])
        behind = (self._broadcasts - numbers.astype(np.int64)) % NUMBERS
        if (behind <= RING).all():
            return Look(numbers)
        rank = 1 + int(behind.argmax())
        return Look(None, rank, self._seen_word + rank * LINE, int(numbers[rank - 1]))

    def _await(self, look: Callable[[], Look]) -> NDArray[np.uint32]:
        """Call ``look`` until it finds all data, and return them."""
        state = look()
        if state.found is not None:
            return state.found
        begun = time.monotonic()
        while (state := look()).found is None:
            waited = time.monotonic() - begun
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            self._shared.sleep(state.word, state.number, SLEEP_SECONDS)
            if waited > SLEEP_SECONDS and (rank := self._gone()) is not None:
                if (state := look()).found is None:
                    raise MissingPeer(rank, ended=True)
                break
            if waited > self._timeout:
                raise MissingPeer(state.rank, ended=False)
        return state.found
