"""Tokens gained in the last steps, which are counted together in the estimates of acceptance."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]


class GainedTokens(NamedTuple):
    """The tokens that n rows gained in several steps, whose drafts have the depth d.

    Attributes:
        rows: the rows, [n].
        gained: number of the row's steps that gained at least 1, 2, .. d + 1 tokens, [n, d + 1].
        steps: number of steps that each row was in, [n].
        means: share of the rows that gained as many tokens, summed over the steps, [d + 1].
    """

    rows: Ints
    gained: Ints
    steps: Ints
    means: Floats


class StepResults:
    """Results of successive steps with drafts of one size, over rows that change a little.

    Counting them together takes about as long as counting those of one step.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Ints, Ints]] = []  # rows of a step, tokens that each gained
        self._ends: list[tuple[int, int]] = []  # steps before a sequence began, its row

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, rows: Ints, counts: Ints) -> None:
        """Add a step.

        Args:
            rows: the rows, [n].
            counts: tokens that each of them gained, [n]; 0: the row had no drafts. It is kept, so
                its memory must not be reused.
        """
        self._steps.append((rows, counts))

    def end(self, row: int) -> None:
        """Note that a new sequence has entered ``row``: earlier steps count in the means only."""
        if self._steps:
            self._ends.append((len(self._steps), row))

    def take(self, depth: int) -> GainedTokens:
        """Return what the steps gained, and forget them. ``depth``: depth of their drafts."""
        of_steps, of_counts = zip(*self._steps)
        sizes = [len(rows) for rows in of_steps]
        width = depth + 2  # 0 to depth + 1 tokens; forced tokens of a tree may be more
        rows = np.concatenate(of_steps)
        counts = np.minimum(np.concatenate(of_counts), width - 1)
        means = _from_last(_means(counts, sizes, width))
        if self._ends:
            own = self._own(rows, sizes)
            rows, counts = rows[own], counts[own]
        self._steps.clear()
        self._ends.clear()
        kept, table = _of_rows(rows, counts, width)
        return GainedTokens(kept, table[:, 1:], table[:, 0], means[1:])

    def _own(self, rows: Ints, sizes: list[int]) -> NDArray[np.bool_]:
        """Return which results are of the sequences that are in the rows now.

        ``rows`` and ``sizes``: the rows of all steps, and their number in each step.
        """
        begins = self._begins(int(rows.max()))
        own: NDArray[np.bool_] = np.repeat(np.arange(len(sizes)), sizes) >= begins[rows]
        return own

    def _begins(self, last: int) -> Ints:
        """Return the number of steps before the sequence of each row began, [last + 1 or more].

        ``last``: the last row that is needed.
        """
        begins = np.zeros(1 + max(last, *(row for _, row in self._ends)), np.int64)
        for steps, row in self._ends:
            begins[row] = steps
        return begins


def _means(counts: Ints, sizes: list[int], width: int) -> NDArray[Any]:
    """Return the share of the rows with 0, 1, .. width - 1 tokens, summed over the steps, [width].

    Args:
        counts: tokens that the rows of each step gained.
        sizes: number of rows of each step.
        width: number of possible counts.
    """
    if min(sizes) == max(sizes):
        return np.bincount(counts, minlength=width) / sizes[0]
    return np.bincount(counts, 1 / np.repeat(sizes, sizes), width)


def _of_rows(rows: Ints, counts: Ints, width: int) -> tuple[Ints, Ints]:
    """Return each of ``rows`` once, [n], and its results of at least 0, 1, .. tokens, [n, width].

    Args:
        rows: the rows of all results.
        counts: tokens of each result, less than ``width``.
        width: number of possible counts.
    """
    if not len(rows):
        return rows, np.zeros((0, width), np.int64)
    flat = np.bincount(rows * width + counts, minlength=(int(rows.max()) + 1) * width)
    table = _from_last(flat.reshape(-1, width))
    kept = table[:, 0].nonzero()[0]
    return kept, table.take(kept, 0)


def _from_last(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of each number of the last dimension and all behind it."""
    return numbers[..., ::-1].cumsum(-1)[..., ::-1]
