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

    def add(self, rows: Ints, accepted: Ints, depth: int | None = None) -> None:
        """Add one verify step of each of n rows.

        Args:
            rows: [n], each row at most once.
            accepted: [n], number of accepted drafts, 0 to ``depth``.
            depth: depth of the step's drafts; None: P.
        """
        self.add_steps(rows, accepted[None], depth)

    def add_steps(self, rows: Ints, accepted: Ints, depth: int | None = None) -> None:
        """Add k verify steps of each of n rows; they count alike.

        Arguments as in :meth:`add`, but ``accepted`` is [k, n], with -1 where a row had no drafts.
        """
        places = np.arange(self._reached.shape[1])
        proposed = places < (len(places) if depth is None else depth)
        keep = self._keep ** len(accepted)
        found = accepted[:, :, None]
        self._reached[rows] = keep * self._reached[rows] + (proposed & (places <= found)).sum(0)
        self._accepted[rows] = keep * self._accepted[rows] + (places < found).sum(0)

    def age(self, rows: Ints, steps: int) -> None:
        """Let the verify steps of ``rows`` count less, as after ``steps`` further ones."""
        keep = self._keep**steps
        self._reached[rows] *= keep
        self._accepted[rows] *= keep

    def totals(self, rows: Ints) -> tuple[Floats, Floats]:
        """Return the weights of reached and of accepted drafts by position, summed over n rows."""
        return self._reached[rows].sum(0), self._accepted[rows].sum(0)

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
