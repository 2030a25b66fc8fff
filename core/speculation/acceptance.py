"""Running acceptance of drafts on the host, for each row.

A verify step of a row is a step in which the row decodes with at least one draft. It accepts 0 to P
drafts, one per position; P is the depth of the drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]


class AcceptanceWindow:
    """Acceptance per position in about the last ``span`` verify steps of each of R rows.

    Older steps count less: the weight of a step falls by the factor ``1 - 1 / span`` with each
    later one. All work is done with numpy over all rows at once.

    Args:
        rows: R, the number of rows.
        depth: P, the most drafts of a verify step that can be accepted.
        span: number of verify steps, at least 1.
    """

    def __init__(self, rows: int, depth: int, span: float) -> None:
        self._keep = 1.0 - 1.0 / span
        #: [R, P] weight of the verify steps whose drafts before the position were all accepted
        self._reached: Floats = np.zeros((rows, depth))
        #: [R, P] weight of those in which the draft at the position was accepted as well
        self._accepted: Floats = np.zeros((rows, depth))

    def clear(self, rows: Ints | int) -> None:
        """Forget the verify steps of ``rows``, for example when other sequences enter them."""
        self._reached[rows] = 0.0
        self._accepted[rows] = 0.0

    def add(self, rows: Ints, gained: Ints, steps: Ints | int = 1) -> None:
        """Add verify steps of each of n rows; those of a row count alike.

        Args:
            rows: [n], each row at most once.
            gained: number of the row's steps that accepted at least 0, 1, .. d drafts, [n, d + 1],
                where d is the depth of their drafts. Steps in which a row had no drafts do not
                count.
            steps: number of steps that each row was in, by which older ones count less.
        """
        depth = gained.shape[1] - 1
        self.age(rows, steps)
        self._reached[rows, :depth] += gained[:, :-1]
        self._accepted[rows, :depth] += gained[:, 1:]

    def age(self, rows: Ints, steps: Ints | int) -> None:
        """Let the verify steps of ``rows`` count less, as after ``steps`` further ones."""
        keep = self._keep**steps
        if isinstance(keep, np.ndarray):
            keep = keep[:, None]
        self._reached[rows] *= keep
        self._accepted[rows] *= keep

    def rates(self, rows: Ints, prior: float | Floats = 0.0, weight: float = 0.0) -> Floats:
        """Return the probability that a draft is accepted after all before it were, [n, P].

        Positions that no verify step has reached have the value ``prior``, also with weight 0.

        Args:
            rows: [n].
            prior: expected value before any verify step, or one for each position, [P].
            weight: number of verify steps for which the prior counts.
        """
        reached = self._reached[rows] + weight
        found = self._accepted[rows] + weight * prior
        return np.divide(found, reached, out=np.full_like(found, prior), where=reached > 0)

    def pooled_rates(self, rows: Ints, prior: Floats, weight: float) -> Floats:
        """Return the probabilities of :meth:`rates` for the rows together, [P].

        ``prior`` and ``weight``: as there; the weight is positive.
        """
        found: Floats = self._accepted[rows].sum(0) + weight * prior
        found /= self._reached[rows].sum(0) + weight
        return found
