"""Choice of the size of the drafts in each step, from acceptance and the seconds of a step.

For each size, the expected tokens of a step are the sum over the decoding rows of 1 plus the
products of the row's acceptance rates at each depth; the size with the most expected tokens per
second is chosen. A row's rate at a depth is the share of accepted drafts there, among those whose
predecessors were accepted. Recent results count more, and a row with few results is taken to be
like the mean of all rows.

Steps with small drafts show nothing about larger ones. Rarely, a step therefore has drafts of the
next larger size, which is paid for from a small share of the time (``EXPLORED``). It costs nothing
if its drafts are accepted, and is then repeated at once.

Everything is computed on the host from committed results only, and is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.speculation.acceptance import AcceptanceWindow

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

EXPLORED = 0.008  #: share of the time that explorations may lose
#: least gain in expected tokens per second for which the drafts become smaller. An estimate that is
#: too high is corrected by the next results, one that is too low only by explorations.
HYSTERESIS = 0.02
ROW_STEPS = 70.0  #: verify steps of a row that count, about; older ones count less and less
MEAN_DECAY = 0.98  #: weight of the older results of all rows with each step
PRIOR_RESULTS = 4.0  #: results of a row that the mean of all rows counts like
FIRST_RATE = 0.7  #: mean rate before any result
FIRST_RESULTS = 8.0  #: results that ``FIRST_RATE`` counts like
#: committed steps after which an exploration that never came back is forgotten
FORGOTTEN_STEPS = 4


@dataclass
class _Exploration:
    """A step in flight with drafts of a larger size than would have been chosen.

    Attributes:
        place: place of its size among the sizes.
        seconds_per_token: those of the size that would have been chosen.
        steps: committed steps since.
    """

    place: int
    seconds_per_token: float
    steps: int = 0


class AdaptivePolicy:
    """The ``protocols.DraftPolicy`` that maximises the expected tokens per second.

    Args:
        shapes: the sizes of the drafts, ascending by tokens.
        costs: seconds of a step for each of ``shapes``.
        rows: number of rows of the sequence table.
    """

    def __init__(self, shapes: tuple[DraftShape, ...], costs: DraftCosts, rows: int) -> None:
        self.shapes = shapes
        # larger drafts cost no less, also where costs are extrapolated
        self._seconds: Floats = np.maximum.accumulate(np.array(costs.table(shapes, rows)), 0)
        self._places = {shape: place for place, shape in enumerate(shapes)}
        self._steps = [shape.steps for shape in shapes]
        self._make_estimates(rows)
        self._chosen = 0
        self._budget = 0.0  # seconds that explorations may still lose
        self._exploration: _Exploration | None = None

    def _make_estimates(self, rows: int) -> None:
        """Set up the estimates of acceptance: of ``rows`` rows, and the mean of all."""
        # rates of trees and of chains differ: a tree accepts any of its branches
        branches = sorted({shape.topk for shape in self.shapes if shape.steps})
        self._kinds = [branches.index(shape.topk) if shape.steps else 0 for shape in self.shapes]
        depth = max(*self._steps, 1)
        kinds = range(max(len(branches), 1))
        self._windows = [AcceptanceWindow(rows, depth, ROW_STEPS) for _ in kinds]
        self._mean_accepted = np.full((len(kinds), depth), FIRST_RATE * FIRST_RESULTS)
        self._mean_results = np.full((len(kinds), depth), FIRST_RESULTS)

    def choose(self, rows: Ints, most: int) -> DraftShape:
        seconds = self._seconds[:, most]
        expected = self.expected(rows)
        speeds = expected / seconds
        best = int(speeds.argmax())
        if best > self._chosen or speeds[best] > (1 + HYSTERESIS) * speeds[self._chosen]:
            self._chosen = best
        chosen = self._chosen
        if self._exploration is None and chosen + 1 < len(self.shapes):
            each = float(seconds[chosen] / expected[chosen])
            if self._budget >= seconds[chosen + 1] - len(rows) * each:
                self._exploration = _Exploration(chosen + 1, each)
                return self.shapes[chosen + 1]
        return self.shapes[chosen]

    def expected(self, rows: Ints) -> Floats:
        """Return the expected tokens of a step of ``rows`` for each size of the drafts."""
        gained = [
            window.rates(rows, accepted / results, PRIOR_RESULTS).cumprod(1).sum(0).cumsum()
            for window, accepted, results in zip(
                self._windows, self._mean_accepted, self._mean_results
            )
        ]
        return len(rows) + np.array(
            [
                gained[kind][steps - 1] if steps else 0.0
                for kind, steps in zip(self._kinds, self._steps)
            ]
        )

    def observe(self, rows: Ints, shape: DraftShape, counts: Ints) -> None:
        place = self._places[shape]
        seconds = float(self._seconds[place, len(rows)])
        self._budget = min(self._budget + EXPLORED * seconds, float(self._seconds[-1, len(rows)]))
        self._settle(place, seconds, int(counts.sum()))
        if shape.steps:
            kind = self._kinds[place]
            self._windows[kind].add(rows, counts - 1, shape.steps)
            self._add_to_mean(kind, shape.steps, counts)

    def _add_to_mean(self, kind: int, steps: int, counts: Ints) -> None:
        """Add the tokens that rows gained in a step of ``steps`` drafts to the mean of all rows."""
        depths = np.arange(steps)
        means = self._mean_results[kind, :steps], self._mean_accepted[kind, :steps]
        for mean, least in zip(means, (depths, depths + 1)):
            mean *= MEAN_DECAY
            mean += (counts[:, None] > least).sum(0)

    def _settle(self, place: int, seconds: float, tokens: int) -> None:
        """Charge an exploration that has come back for the time that it has lost."""
        exploration = self._exploration
        if exploration is None:
            return
        exploration.steps += 1
        if exploration.place == place:
            self._budget -= max(0.0, seconds - tokens * exploration.seconds_per_token)
            self._exploration = None
        elif exploration.steps > FORGOTTEN_STEPS:
            self._exploration = None

    def forget(self, row: int) -> None:
        for window in self._windows:
            window.clear(row)
