"""Tokens gained in the last steps, which are counted together in the estimates of acceptance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]


class GainedTokens(NamedTuple):
    """The tokens that n rows gained in several steps, whose drafts have the depth d.

    Attributes:
        rows: the rows, [n].
        gained: number of the row's steps that gained at least 1, 2, .. d + 1 tokens, [n, d + 1].
        steps: number of steps that each row was in, [n], or one number for all.
        means: share of the rows that gained as many tokens, summed over the steps, [d + 1].
    """

    rows: Ints
    gained: Ints
    steps: Ints | int
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
            counts: tokens that each of them gained, [n]; 0: the row had no drafts. A copy is kept,
                as results may be views of memory that later steps reuse.
        """
        self._steps.append((rows, counts.copy()))

    def end(self, row: int) -> None:
        """Note that a new sequence has entered ``row``: earlier steps count in the means only."""
        if self._steps:
            self._ends.append((len(self._steps), row))

    def take(self, depth: int) -> GainedTokens:
        """Return what the steps gained, and forget them. ``depth``: depth of their drafts."""
        steps = self._steps
        rows, _ = steps[0]
        same = not self._ends and all(np.array_equal(other, rows) for other, _ in steps[1:])
        least = np.arange(1, depth + 2)
        if same:
            counts = np.stack([counts for _, counts in steps])
            gained = (counts[:, :, None] >= least).sum(0)
            found = GainedTokens(rows, gained, len(steps), gained.sum(0) / len(rows))
        else:
            found = self._taken_apart(least)
        self._steps.clear()
        self._ends.clear()
        return found

    def _taken_apart(self, least: Ints) -> GainedTokens:
        """Return the result of ``take`` for steps of different rows.

        ``least``: least tokens of a step for each column of the result.
        """
        of_steps, counts = zip(*self._steps)
        sizes = [len(rows) for rows in of_steps]
        rows = np.concatenate(of_steps)
        enough = np.concatenate(counts)[:, None] >= least
        means = (1 / np.repeat(sizes, sizes)) @ enough
        if self._ends:
            own = np.repeat(np.arange(len(sizes)), sizes) >= self._begins(int(rows.max()))[rows]
            rows, enough = rows[own], enough[own]
        numbers = np.bincount(rows)
        kept = np.flatnonzero(numbers)
        gained = np.stack([np.bincount(rows, column)[kept] for column in enough.T], 1)
        return GainedTokens(kept, gained, numbers[kept], means)

    def _begins(self, last: int) -> Ints:
        """Return the number of steps before the sequence of each row began, [last + 1 or more].

        ``last``: the last row that is needed.
        """
        begins = np.zeros(1 + max(last, *(row for _, row in self._ends)), np.int64)
        for steps, row in self._ends:
            begins[row] = steps
        return begins
