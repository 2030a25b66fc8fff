"""The sequence table: one persistent row per running sequence, so a step updates only changes.

The scheduler owns and writes it; all other components only read it. Columns are numpy arrays. The
operating system allocates ``tokens`` and ``pages`` lazily, so a long context costs nothing until it
is used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.request import Sequence


class SequenceTable:
    """A table of ``rows`` rows of at most ``context`` tokens and ``context / page_size`` pages.

    The columns have R rows, C = context, P = pages per row.

    Attributes:
        tokens: int32 [R, C], prompt and committed output.
        length: int32 [R], committed tokens (prompt and output).
        launched: int32 [R], tokens whose KV entries are cached, or computed by a launched step.
        prompt_len: int32 [R], prompt tokens.
        max_length: int32 [R], length at which the row's sequence ends.
        pages: int32 [R, P], page numbers; unused entries are 0, the scratch page.
        num_pages: int32 [R], number of pages of the row.
        epoch: int64 [R], grows whenever the row's owner changes; stale results are recognised by
            it.
        sequences: the sequence of each row, or None.
    """

    def __init__(self, rows: int, context: int, page_size: int) -> None:
        pages = -(-context // page_size)
        self.rows = rows
        self.context = context
        self.page_size = page_size
        self.tokens: NDArray[np.int32] = np.zeros((rows, context), np.int32)
        self.pages: NDArray[np.int32] = np.zeros((rows, pages), np.int32)
        self.length: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.launched: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.prompt_len: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.max_length: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.num_pages: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.epoch: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.sequences: list[Sequence | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def join(self, sequence: Sequence) -> int:
        """Give ``sequence`` a row and copy its tokens to the row.

        Returns:
            The row.

        Raises:
            IndexError: no row is free.
        """
        row = self._free.pop()
        tokens = sequence.all_tokens()
        sequence.row = row
        self.sequences[row] = sequence
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)
        self.launched[row] = 0
        self.prompt_len[row] = len(sequence.prompt)
        self.max_length[row] = sequence.max_length
        self.num_pages[row] = 0
        self.epoch[row] += 1
        return row

    def leave(self, row: int) -> NDArray[np.int32]:
        """Free the row and return a copy of its page numbers; the caller owns these pages now."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        held = self.pages[row, : self.num_pages[row]].copy()
        sequence.row = -1
        self.sequences[row] = None
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        self.length[row] = 0
        self.launched[row] = 0
        self.epoch[row] += 1
        self._free.append(row)
        return held

    def add_pages(self, row: int, pages: NDArray[np.int32]) -> None:
        """Append pages to a row."""
        count = int(self.num_pages[row])
        self.pages[row, count : count + len(pages)] = pages
        self.num_pages[row] = count + len(pages)
