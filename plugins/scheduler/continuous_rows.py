"""The running set of the continuous scheduler: who sits in which row, on which pages, and who owns
those.

Every page is in one of three hands: the allocator (free), the prefix cache, or one row. A row's
page list starts with ``shared`` pages of the cache, which it has locked, and goes on with its own.
Columns are numpy arrays over rows, so that a decoding step touches none of them one by one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.protocols import PrefixCache, PrefixMatch
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable

Ints = NDArray[np.int32]
STOP_COLUMNS = (
    4  #: stop ids compared in one numpy call; sequences with more are looked up one by one
)
NO_STOP = -1


class Rows:
    """Columns over the R rows of ``table``, and its page accounting.

    Attributes:
        ids: int64 [R] sequence ids.
        pending: int32 [R] launched steps that will yield tokens of this row and are not committed.
        base: int32 [R] length at the last join; a longer row has been through its whole prefill.
        min_length: int32 [R] stop ids count from this length on.
        stops: int32 [R, 4] stop ids, padded with -1. ``many_stops`` holds the whole set of rows
            with more.
        logprobs: int32 [R] how many log-probabilities are wanted, -1 for none.
        shared: int32 [R] leading pages that belong to the prefix cache.
        running: row -> sequence in order of admission; ``prefilling``: the rows among them with
            prompt left to launch.
        unpublished: rows whose prompt is not in the cache yet, by the salt and tokens of its first
            page.
        joined, left: since the last batch, for the runner.
    """

    def __init__(self, table: SequenceTable, pages: PageAllocator, cache: PrefixCache) -> None:
        self.table = table
        self.pages = pages
        self.cache = cache
        rows = table.rows
        self.ids = np.zeros(rows, np.int64)
        self.pending, self.base, self.min_length, self.shared = (
            np.zeros(rows, np.int32) for _ in range(4)
        )
        self.stops = np.full((rows, STOP_COLUMNS), NO_STOP, np.int32)
        self.many_stops: dict[int, frozenset[int]] = {}
        self.logprobs = np.full(rows, -1, np.int32)
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, None] = {}
        self.unpublished: dict[tuple[str, bytes], int] = {}
        self.joined: list[Sequence] = []
        self.left: list[int] = []
        self._locks: dict[int, PrefixMatch] = {}
        self._decoding: dict[int, None] = {}
        self._decode_rows: Ints | None = None

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.table.page_size)

    # ---- membership ------------------------------------------------------------------------------

    def join(self, sequence: Sequence, match: PrefixMatch, fresh: Ints, context: int) -> int:
        """Give ``sequence`` a row on the locked ``match`` and ``fresh`` pages. Its prefill starts
        after the match.
        """
        table = self.table
        row = table.join(sequence)
        table.max_length[row] = min(sequence.max_length, context)
        table.add_pages(row, match.pages)
        table.add_pages(row, fresh)
        table.launched[row] = match.length
        self.shared[row] = len(match.pages)
        self._locks[row] = match
        self.running[row] = sequence
        self.prefilling[row] = None
        self.joined.append(sequence)
        self._set_columns(row, sequence)
        key = self._first_page(row, sequence)
        if key is not None:
            self.unpublished.setdefault(key, row)
        return row

    def _set_columns(self, row: int, sequence: Sequence) -> None:
        params = sequence.params
        stop_ids = sequence.stop_ids
        self.ids[row] = sequence.id
        self.pending[row] = 0
        self.base[row] = self.table.length[row]
        self.min_length[row] = len(sequence.prompt) + params.min_tokens
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.stops[row] = NO_STOP
        if len(stop_ids) > STOP_COLUMNS:
            self.many_stops[row] = stop_ids
        else:
            self.stops[row, : len(stop_ids)] = sorted(stop_ids)

    def start_decoding(self, row: int) -> None:
        """The row's last prompt chunk is launched: from the next step on it decodes."""
        del self.prefilling[row]
        self._decoding[row] = None
        self._decode_rows = None

    def decode_rows(self) -> Ints:
        """int32 rows in order of joining the decoding set. Never written to: a new array when
        membership changes.
        """
        if self._decode_rows is None:
            self._decode_rows = np.fromiter(self._decoding, np.int32, len(self._decoding))
        return self._decode_rows

    def release(self, row: int, keep: bool = True) -> Sequence:
        """End the row's stay: bring ``sequence.output`` up to date, hand its pages to the cache or
        the allocator.

        Kept are whole pages of committed computation: a token's cache entry is written by the step
        after the one that drew it, so a row of ``length`` tokens has ``length - 1`` of them. A
        prefill that was not committed to its end
        is not kept: whether its numbers are finite is only known there. ``keep=False`` keeps
        nothing.
        """
        table = self.table
        sequence = self.running.pop(row)
        length = int(table.length[row])
        prompt_len = int(table.prompt_len[row])
        sequence.output = table.tokens[row, prompt_len:length].tolist()
        shared = int(self.shared[row])
        computed = length - 1 if keep and self.cache.shares and length > self.base[row] else 0
        whole = max(computed // table.page_size, shared)
        tokens = table.tokens[row, : whole * table.page_size].copy()
        self._forget_first_page(row, sequence)
        held = table.leave(row)
        self.pages.give(held[whole:])
        if whole > shared:
            self.pages.give(self.cache.insert(tokens, held[:whole], sequence.salt))
        self.cache.lock(self._locks.pop(row), -1)
        self._leave(row)
        return sequence

    def _leave(self, row: int) -> None:
        self.prefilling.pop(row, None)
        if row in self._decoding:
            del self._decoding[row]
            self._decode_rows = None
        self.many_stops.pop(row, None)
        self.pending[row] = self.shared[row] = 0
        self.left.append(row)

    # ---- pages -----------------------------------------------------------------------------------

    def lacking(self, rows: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """The rows that have too few pages for ``lengths`` tokens, and how many they lack."""
        size = self.table.page_size
        held = self.table.num_pages[rows]
        short = np.flatnonzero(lengths > held * np.int32(size))
        return rows[short], -(-lengths[short] // size) - held[short]

    def grow(self, rows: Ints, counts: Ints, fresh: Ints) -> None:
        """Append ``counts[i]`` of the ``fresh`` pages to ``rows[i]``."""
        owners = np.repeat(rows, counts)
        offsets = np.arange(len(fresh)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.table.pages[owners, self.table.num_pages[owners] + offsets] = fresh
        self.table.num_pages[rows] += counts

    def make_free(self, wanted: int) -> bool:
        """Evict from the cache until ``wanted`` pages are free. False when that is not enough."""
        missing = wanted - self.pages.free
        if missing > 0:
            self.pages.give(self.cache.evict(missing))
        return self.pages.free >= wanted

    # ---- sharing a running prompt ----------------------------------------------------------------

    def publish(self, row: int) -> None:
        """Put the prompt's whole pages into the cache while the row runs on, and lock them.

        Where the cache holds the same tokens in other pages already, the row moves over to those
        and its own are freed. Steps in flight still read the old ones, and the device runs them
        before any step that may reuse them.
        """
        sequence = self.running[row]
        table = self.table
        self._forget_first_page(row, sequence)
        whole = (int(table.length[row]) - 1) // table.page_size
        if not self.cache.shares or whole <= self.shared[row]:
            return
        tokens = table.tokens[row, : whole * table.page_size]
        mine = table.pages[row, :whole].copy()
        unneeded = self.cache.insert(tokens, mine, sequence.salt)
        match = self.cache.match(tokens, sequence.salt)
        self.cache.lock(match, 1)
        self.cache.lock(self._locks[row], -1)
        self._locks[row] = match
        kept = len(match.pages)
        self.shared[row] = kept
        table.pages[row, :kept] = match.pages
        self.pages.give(np.setdiff1d(unneeded, mine[kept:]))

    def twin(self, tokens: Ints, salt: str) -> tuple[int, int]:
        """A running sequence whose prompt is still computed, and its tokens in common with
        ``tokens``, in whole pages.

        Returns (id, tokens); (-1, 0) when there is none.
        """
        size = self.table.page_size
        row = self.unpublished.get((salt, tokens[:size].tobytes()))
        if row is None:
            return -1, 0
        count = min(int(self.table.length[row]), len(tokens)) - 1
        differs = tokens[:count] != self.table.tokens[row, :count]
        common = int(differs.argmax()) if differs.any() else count
        return int(self.ids[row]), common // size * size

    def _first_page(self, row: int, sequence: Sequence) -> tuple[str, bytes] | None:
        size = self.table.page_size
        if not self.cache.shares or self.base[row] <= size:
            return None
        return sequence.salt, self.table.tokens[row, :size].tobytes()

    def _forget_first_page(self, row: int, sequence: Sequence) -> None:
        key = self._first_page(row, sequence)
        if key is not None and self.unpublished.get(key) == row:
            del self.unpublished[key]
