"""The running set of the continuous scheduler: its rows, their pages, and the pages' owners.

Every page has one of three owners: the allocator (a free page), the prefix cache, or one row. A
row's page list starts with ``shared`` pages of the cache, which the row has locked, and continues
with its own pages. Columns are numpy arrays over rows, so that a decode step needs no loop over
rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import GlowplugError
from glowplug.core.protocols import PrefixCache, PrefixMatch
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.plugins.scheduler.continuous_faults import Faults

Ints = NDArray[np.int32]
#: stop ids per row that one numpy call compares; rows with more stop ids are compared one by one
STOP_COLUMNS = 4
NO_STOP = -1  #: padding of the stop ids


class Rows:
    """The running sequences: one array per property over the R rows of ``table``, and their pages.

    Attributes:
        ids: int64 [R], sequence ids.
        pending: int32 [R], number of launched steps that will yield tokens of the row and are not
            committed yet.
        base: int32 [R], the sequence's length when it last joined the row; a row that is longer
            now has completed its prefill.
        min_length: int32 [R], length from which on stop ids end the row.
        stops: int32 [R, 4], stop ids, padded with -1.
        many_stops: row -> all stop ids, for rows with more than 4.
        logprobs: int32 [R], number of log-probabilities requested; -1: they are not requested.
        shared: int32 [R], number of leading pages that belong to the prefix cache.
        running: row -> sequence, in order of admission.
        prefilling: mapping whose keys are the rows with a part of the prompt not launched yet.
        unpublished: (salt, tokens of the first page) -> row, for rows whose prompt is not in the
            cache yet.
        joined: sequences that have entered a row since the last batch, for the runner.
        left: rows that have been left since the last batch, for the runner.
        faults: sequences for which a call of policy or cache has failed.
    """

    def __init__(
        self, table: SequenceTable, pages: PageAllocator, cache: PrefixCache, faults: Faults
    ) -> None:
        self.table = table
        self.pages = pages
        self.cache = cache
        self.faults = faults
        self._allocate(table.rows)
        self.many_stops: dict[int, frozenset[int]] = {}
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, None] = {}
        self.unpublished: dict[tuple[str, bytes], int] = {}
        self.joined: list[Sequence] = []
        self.left: list[int] = []
        self._locks: dict[int, PrefixMatch] = {}
        self._decoding: dict[int, None] = {}
        self._decode_rows: Ints | None = None

    def _allocate(self, rows: int) -> None:
        """Allocate the arrays of the rows' properties for ``rows`` rows."""
        self.ids = np.zeros(rows, np.int64)
        self.pending = np.zeros(rows, np.int32)
        self.base = np.zeros(rows, np.int32)
        self.min_length = np.zeros(rows, np.int32)
        self.shared = np.zeros(rows, np.int32)
        self.stops = np.full((rows, STOP_COLUMNS), NO_STOP, np.int32)
        self.logprobs = np.full(rows, -1, np.int32)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold ``tokens`` tokens."""
        return -(-tokens // self.table.page_size)

    # ---- membership ------------------------------------------------------------------------------

    def join(self, sequence: Sequence, match: PrefixMatch, fresh: Ints, context: int) -> int:
        """Give ``sequence`` a row with pages; its prefill starts after the cached prefix.

        Args:
            sequence: the sequence.
            match: the cached prefix of the sequence, locked by the caller.
            fresh: int32 page numbers for the tokens after the prefix.
            context: context length, in tokens.

        Returns:
            The row.
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

    def unlaunched(self) -> int:
        """Return the number of tokens of the running prompts that no step has been given yet."""
        table = self.table
        return sum(int(table.length[row] - table.launched[row]) for row in self.prefilling)

    def start_decoding(self, row: int) -> None:
        """Move a row whose last prompt chunk is launched to the decoding rows of the next step."""
        del self.prefilling[row]
        self._decoding[row] = None
        self._decode_rows = None

    def decode_rows(self) -> Ints:
        """Return the decoding rows, int32, in the order in which they began to decode.

        The array is never changed; a new one is made when the membership changes.
        """
        if self._decode_rows is None:
            self._decode_rows = np.fromiter(self._decoding, np.int32, len(self._decoding))
        return self._decode_rows

    def release(self, row: int, keep: bool = True) -> Sequence:
        """Free a row: update ``sequence.output``, and give its pages to the cache or the allocator.

        The cache gets the pages that committed steps have filled: a token's KV entry is written by
        the step after the one that sampled the token, so a row of ``length`` tokens has
        ``length - 1`` entries. A prefill that was not committed to its end is not cached: only the
        result of its last step shows whether its values are finite.

        Args:
            row: the row.
            keep: give the computed pages to the cache; False: free all pages.

        Returns:
            The sequence.
        """
        table = self.table
        sequence = self.running.pop(row)
        length = int(table.length[row])
        sequence.output = table.tokens[row, table.prompt_len[row] : length].tolist()
        shared = int(self.shared[row])
        computed = length - 1 if keep and self.cache.shares and length > self.base[row] else 0
        whole = max(computed // table.page_size, shared)
        tokens = table.tokens[row, : whole * table.page_size].copy()
        self._forget_first_page(row, sequence)
        held = table.leave(row)
        self.pages.give(held[whole:])
        if whole > shared:
            self.pages.give(self._insert(tokens, held[:whole], shared, sequence))
        self.cache.lock(self._locks.pop(row), -1)
        self._leave(row)
        return sequence

    def _leave(self, row: int) -> None:
        self.prefilling.pop(row, None)
        if row in self._decoding:
            del self._decoding[row]
            self._decode_rows = None
        self.many_stops.pop(row, None)
        self.pending[row] = 0
        self.shared[row] = 0
        self.left.append(row)

    def _insert(self, tokens: Ints, pages: Ints, shared: int, sequence: Sequence) -> Ints:
        """Give the first pages of a sequence to the cache.

        If the cache fails, the sequence is noted and keeps its pages. The accounts of all pages are
        checked afterwards, see ``SequenceEnds.check_accounts``.

        Args:
            tokens: tokens of the pages.
            pages: the pages.
            shared: number of leading pages that belong to the cache already.
            sequence: the sequence.

        Returns:
            The pages that the caller keeps.

        Raises:
            GlowplugError: the cache has failed after it took pages.
        """
        salt = sequence.admission.salt
        try:
            return self.cache.insert(tokens, pages, salt)
        except Exception as error:
            self.faults.note(sequence, "cache", "insert", error)
        own = pages[shared:]
        if np.isin(self.cache.match(tokens, salt).pages, own).any():
            raise GlowplugError(
                f"{self.faults.found[sequence.id]}\n    all requests end, because the cache holds "
                "pages of the request"
            )
        return own

    # ---- pages -----------------------------------------------------------------------------------

    def lacking(self, rows: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Return the rows with too few pages for ``lengths`` tokens, and how many each lacks."""
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
        """Evict cached pages until ``wanted`` pages are free. Return False if this fails."""
        missing = wanted - self.pages.free
        if missing > 0:
            self.pages.give(self.cache.evict(missing))
        return self.pages.free >= wanted

    # ---- sharing a running prompt ----------------------------------------------------------------

    def publish(self, row: int) -> None:
        """Put the prompt's whole pages into the cache while the row runs on, and lock them.

        If the cache holds the same tokens in other pages already, the row switches to those pages
        and its own are freed. Steps in flight still read the old pages; the device runs these steps
        before any step that may reuse the pages.
        """
        sequence = self.running[row]
        table = self.table
        self._forget_first_page(row, sequence)
        whole = (int(table.length[row]) - 1) // table.page_size
        if not self.cache.shares or whole <= self.shared[row]:
            return
        tokens = table.tokens[row, : whole * table.page_size]
        mine = table.pages[row, :whole].copy()
        unneeded = self._insert(tokens, mine, int(self.shared[row]), sequence)
        if sequence.id not in self.faults.found:
            self._share(row, self.cache.match(tokens, sequence.admission.salt), mine, unneeded)

    def _share(self, row: int, match: PrefixMatch, mine: Ints, unneeded: Ints) -> None:
        """Lock the cached pages of a row's prompt, and free its own pages in their places.

        Args:
            row: the row.
            match: the row's prompt in the cache.
            mine: the row's pages before.
            unneeded: those that the cache did not need.
        """
        self.cache.lock(match, 1)
        self.cache.lock(self._locks[row], -1)
        self._locks[row] = match
        self.shared[row] = kept = len(match.pages)
        self.table.pages[row, :kept] = match.pages
        self.pages.give(np.setdiff1d(unneeded, mine[kept:]))

    def twin(self, tokens: Ints, salt: str) -> tuple[int, int]:
        """Find a running sequence that computes a prompt with the same first page as ``tokens``.

        Returns:
            (id, number of common tokens in whole pages); (-1, 0) if there is none.
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
        """Return a row's key in ``unpublished``: (salt, bytes of the tokens of its first page).

        None if the prompt cannot be shared.
        """
        size = self.table.page_size
        if not self.cache.shares or self.base[row] <= size:
            return None
        return sequence.admission.salt, self.table.tokens[row, :size].tobytes()

    def _forget_first_page(self, row: int, sequence: Sequence) -> None:
        key = self._first_page(row, sequence)
        if key is not None and self.unpublished.get(key) == row:
            del self.unpublished[key]
