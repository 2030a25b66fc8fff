"""Running acceptance of drafts on the host, for each row.

A verify step of a row is a step in which the row decodes with at least one draft. It accepts 0 to P
drafts, one per position; P is the depth of the drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

#: weight of a prior that counts only where no verify step does. A power of two, so that the prior
#: alone is the result exactly
LEAST_WEIGHT = 2.0**-100


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
        #: [R, 2, P] weight of the verify steps whose drafts before the position were all accepted,
        #: and of those in which the draft at the position was accepted as well
        self._weights: Floats = np.zeros((rows, 2, depth))

    def clear(self, rows: Ints | int) -> None:
        """Forget the verify steps of ``rows``, for example when other sequences enter them."""
        self._weights[rows] = 0.0

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
        weights = self._aged(rows, steps)
        weights[:, 0, :depth] += gained[:, :-1]
        weights[:, 1, :depth] += gained[:, 1:]
        self._weights[rows] = weights

    def age(self, rows: Ints, steps: Ints | int) -> None:
        """Let the verify steps of ``rows`` count less, as after ``steps`` further ones."""
        self._weights[rows] = self._aged(rows, steps)

    def _aged(self, rows: Ints, steps: Ints | int) -> Floats:
        """Return the weights of ``rows`` after ``steps`` further verify steps, [n, 2, P]."""
        weights = self._weights.take(rows, 0)
        weights *= np.reshape(self._keep**steps, (-1, 1, 1))
        return weights

    def rates(
        self,
        rows: Ints,
        prior: float | Floats = 0.0,
        weight: float = LEAST_WEIGHT,
        pooled: float | None = None,
    ) -> Floats:
        """Return the probability that a draft is accepted after all before it were, [n, P].

        Positions that no verify step has reached have the value ``prior``.

        Args:
            rows: [n].
            prior: expected value before any verify step, or one for each position, [P].
            weight: number of verify steps for which the prior counts, positive.
            pooled: None: ``prior`` is the prior of each row. Otherwise it is the mean of all
                ``rows``, in which ``prior`` counts for this number of verify steps.
        """
        weights = self._weights.take(rows, 0)
        if pooled is not None:
            reached, accepted = weights.sum(0)
            prior = (accepted + pooled * prior) / (reached + pooled)
        found: Floats = weights[:, 1] + weight * prior
        found /= weights[:, 0] + weight
        return found
