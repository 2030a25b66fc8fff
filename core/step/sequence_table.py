"""The sequence table: one persistent row a running sequence, so that a step touches only what
changed.

Owned and written by the scheduler; everyone else reads. Columns are numpy arrays; ``tokens`` and
``pages`` are allocated lazily by the operating system, so a long context costs nothing until it is
used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.request import Sequence


class SequenceTable:
    """``rows`` rows of at most ``context`` tokens and ``context / page_size`` pages.

    Columns (R rows, C context, P pages a row):
        tokens int32 [R, C]: prompt and committed output.
        length int32 [R]: committed tokens (prompt + output).
        launched int32 [R]: tokens whose KV a launched step computes or has computed.
        prompt_len, max_length int32 [R].
        pages int32 [R, P], num_pages int32 [R]: page numbers; unused entries are 0, the scratch
            page.
        epoch int64 [R]: grows whenever the row changes hands; stale results are recognised by it.
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
        """Give ``sequence`` a row, copy its tokens in. IndexError when no row is free."""
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
        """Free the row; returns its page numbers (a copy), which the caller owns now."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        held = self.pages[row, : self.num_pages[row]].copy()
        sequence.row = -1
        self.sequences[row] = None
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = self.length[row] = self.launched[row] = 0
        self.epoch[row] += 1
        self._free.append(row)
        return held

    def add_pages(self, row: int, pages: NDArray[np.int32]) -> None:
        count = int(self.num_pages[row])
        self.pages[row, count : count + len(pages)] = pages
        self.num_pages[row] = count + len(pages)
