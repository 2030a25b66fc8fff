"""Choice of the size of the drafts in each step, from acceptance and the seconds of a step.

For each size, the expected tokens of a step are the sum over the decoding rows of 1 plus the
products of the row's acceptance rates at each depth; the size with the most expected tokens per
second is chosen. A row's rate at a depth is the share of accepted drafts there, among those whose
predecessors were accepted. Recent results count more, and a row with few results is taken to be
like the mean of all rows. If the algorithm foresees drafts (``expect``), only rows with drafts
count in the rates, and only they are expected to gain tokens by drafts.

Chains and trees have rates of their own: a tree accepts any of its branches. A step shows the rates
of its kind alone. Those of the other kind are taken to change with them, so that the odds of both
keep their ratio; a kind without any result has the rates of the other one.

Steps with small drafts show nothing about larger ones. A step therefore has drafts of the next
larger size when most rows are new, and otherwise rarely, which is paid for from a small share of
the time (``EXPLORED``). It costs nothing if its drafts are accepted, and is then repeated at once.

Everything is computed on the host from committed results and rank 0's seconds, so that ranks choose
alike. A step of the same rows as the one before keeps its size for ``DECIDED_STEPS`` steps, and
their results are added together: with small models the host's time is that of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.speculation.acceptance import AcceptanceWindow
from glowplug.core.speculation.step_seconds import StepSeconds

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

EXPLORED = 0.008  #: share of the time that explorations may lose
#: least gain in expected tokens per second for which the drafts become smaller. An estimate that is
#: too high is corrected by the next results, one that is too low only by explorations.
HYSTERESIS = 0.02
ROW_STEPS = 70.0  #: verify steps of a row that count, about; older ones count less and less
MEAN_DECAY = 0.98  #: weight of the older results of all rows with each step
PRIOR_RESULTS = 4.0  #: results of a row that the mean of the step's rows counts like
POOLED_RESULTS = 4.0  #: results of the step's rows that the mean of all rows counts like
FIRST_RATE = 0.7  #: mean rate before any result
FIRST_RESULTS = 8.0  #: results that ``FIRST_RATE`` counts like
LEAST_RATE = 0.02  #: least mean rate whose odds count, and least distance from 1
#: steps of the same rows with one decision: choosing and adding results takes 40 us of the host
DECIDED_STEPS = 8
#: steps with one decision after the size has changed: its first results may change it again
CHANGED_STEPS = 2
#: committed steps after which an exploration need not wait for its share of the time once half of
#: the rows are new, because their acceptance is not known; its loss is charged nevertheless. At one
#: row a rejected draft costs about two thirds of a step
FRESH_STEPS = 25
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


@dataclass
class _Decision:
    """A choice for several steps of the same rows.

    Attributes:
        rows: the rows.
        most: most decoding rows of any group.
        last: number of steps for which it holds.
        steps: steps so far.
    """

    rows: Ints
    most: int
    last: int = DECIDED_STEPS
    steps: int = 1

    def holds(self, rows: Ints, most: int) -> bool:
        """Return whether the choice is also that of a further step."""
        same = most == self.most and np.array_equal(rows, self.rows)
        return same and self.steps < self.last


class AdaptivePolicy:
    """The ``protocols.DraftPolicy`` that maximises the expected tokens per second.

    Args:
        shapes: the sizes of the drafts, ascending by tokens.
        costs: seconds of a step for each of ``shapes``.
        rows: number of rows of the sequence table.
        clocked: correct ``costs`` by the seconds of steps in service.
    """

    def __init__(
        self, shapes: tuple[DraftShape, ...], costs: DraftCosts, rows: int, clocked: bool = False
    ) -> None:
        self.shapes = shapes
        self.clocked = clocked
        self._seconds = StepSeconds(np.array(costs.table(shapes, rows)))
        self._places = {shape: place for place, shape in enumerate(shapes)}
        self._steps = [shape.steps for shape in shapes]
        self._make_estimates(rows)
        self._have = np.ones(rows, np.bool_)  # rows that have drafts for their next step
        self._chosen = 0
        self._decision: _Decision | None = None
        self._budget = 0.0  # seconds that explorations may still lose
        self._exploration: _Exploration | None = None
        self._fresh = 0  # sequences that have begun since the last free exploration
        self._since_free = 0  # committed steps since then
        #: tokens gained in steps that are not yet added; 0: the row had no drafts
        self._results: list[Ints] = []
        self._results_of: tuple[Ints, int] = np.zeros(0, np.int32), 0  # their rows, place of size

    def _make_estimates(self, rows: int) -> None:
        """Set up the estimates of acceptance: of ``rows`` rows, and the mean of all."""
        branches = sorted({shape.topk for shape in self.shapes if shape.steps})
        self._kinds = [branches.index(shape.topk) if shape.steps else 0 for shape in self.shapes]
        depth = max(*self._steps, 1)
        kinds = range(max(len(branches), 1))
        self._windows = [AcceptanceWindow(rows, depth, ROW_STEPS) for _ in kinds]
        self._mean_accepted = np.full((len(kinds), depth), FIRST_RATE * FIRST_RESULTS)
        self._mean_results = np.full((len(kinds), depth), FIRST_RESULTS)

    def choose(self, rows: Ints, most: int) -> DraftShape:
        decision = self._decision
        if decision is not None and decision.holds(rows, most):
            decision.steps += 1
            return self.shapes[self._chosen]
        before = self._chosen
        self._decision = decision = _Decision(rows, most)
        self._add_results()
        self._seconds.refresh()
        shape = self._decided(rows, self._seconds.at(most))
        if self._chosen != before:
            decision.last = CHANGED_STEPS
        return shape

    def _decided(self, rows: Ints, seconds: Floats) -> DraftShape:
        """Choose a size by the results so far, and return it or one to explore.

        ``seconds``: seconds of a step of each size.
        """
        expected = self.expected(rows)
        speeds = expected / seconds
        best = int(speeds.argmax())
        if best > self._chosen or speeds[best] > (1 + HYSTERESIS) * speeds[self._chosen]:
            self._chosen = best
        chosen = self._chosen
        smaller = self._seconds.unmeasured(len(rows), chosen) if self.clocked else None
        if smaller is not None:
            self._decision = None  # for one step
            return self.shapes[smaller]
        if self._explores(rows, seconds, expected):
            return self.shapes[chosen + 1]
        return self.shapes[chosen]

    def _explores(self, rows: Ints, seconds: Floats, expected: Floats) -> bool:
        """Begin to explore the size after the chosen one, and return whether it is worth its time.

        ``seconds`` and ``expected``: seconds and expected tokens of a step of each size.
        """
        chosen = self._chosen
        if self._exploration is not None or chosen + 1 == len(self.shapes):
            return False
        each = float(seconds[chosen] / expected[chosen])
        free = 2 * self._fresh >= len(rows) and self._since_free >= FRESH_STEPS
        if not free and self._budget < seconds[chosen + 1] - len(rows) * each:
            return False
        self._exploration = _Exploration(chosen + 1, each)
        if free:
            self._fresh = self._since_free = 0
        return True

    def expected(self, rows: Ints) -> Floats:
        """Return the expected tokens of a step of ``rows`` for each size of the drafts."""
        gained = []
        drafting = rows[self._have[rows]]
        for window, accepted, results in zip(
            self._windows, self._mean_accepted, self._mean_results
        ):
            reached, taken = window.totals(rows)
            prior = taken + POOLED_RESULTS * accepted / results
            rates = window.rates(drafting, prior / (reached + POOLED_RESULTS), PRIOR_RESULTS)
            gained.append(rates.cumprod(1).sum(0).cumsum())
        return len(rows) + np.array(
            [
                gained[kind][steps - 1] if steps else 0.0
                for kind, steps in zip(self._kinds, self._steps)
            ]
        )

    def observe(self, rows: Ints, shape: DraftShape, counts: Ints) -> None:
        place = self._places[shape]
        of_sizes = self._seconds.at(len(rows))
        seconds = float(of_sizes[place])
        self._budget = min(self._budget + EXPLORED * seconds, float(of_sizes[-1]))
        self._since_free += 1
        if self._exploration is not None:
            self._settle(self._exploration, place, seconds, int(counts.sum()))
        if not shape.steps:
            return
        known, held = self._results_of
        if held != place or not np.array_equal(known, rows):
            self._add_results()
            self._results_of = rows, place
        self._results.append(np.where(self._have[rows], counts, 0))
        if len(self._results) == DECIDED_STEPS:
            self._add_results()

    def expect(self, rows: Ints, drafts: Ints) -> None:
        """Note how many drafts rows have for their next steps; see ``protocols.DraftPolicy``."""
        self._have[rows] = drafts > 0

    def took(self, rows: int, shape: DraftShape, seconds: float) -> None:
        self._seconds.add(self._places[shape], rows, seconds)

    def _add_results(self) -> None:
        """Add the tokens gained in the last steps to the estimates of acceptance."""
        if not self._results:
            return
        rows, place = self._results_of
        counts = np.stack(self._results)
        self._results = []
        kind, steps = self._kinds[place], self._steps[place]
        self._windows[kind].add_steps(rows, counts - 1, steps)
        depths = np.arange(steps)
        before = self._mean_odds(kind, steps)
        means = self._mean_results[kind, :steps], self._mean_accepted[kind, :steps]
        for mean, least in zip(means, (depths, depths + 1)):
            mean *= MEAN_DECAY ** len(counts)
            mean += (counts[:, :, None] > least).mean(1).sum(0)
        self._change_others(kind, rows, len(counts), self._mean_odds(kind, steps) / before)

    def _mean_odds(self, kind: int, steps: int) -> Floats:
        """Return the odds that a draft of a kind is accepted, by depth, float64 [steps]."""
        rates = self._mean_accepted[kind, :steps] / self._mean_results[kind, :steps]
        rates = rates.clip(LEAST_RATE, 1 - LEAST_RATE)
        odds: Floats = rates / (1 - rates)
        return odds

    def _change_others(self, kind: int, rows: Ints, count: int, ratio: Floats) -> None:
        """Let the estimates of the other kinds follow new results of ``kind``.

        Args:
            kind: kind of the steps with results.
            rows: their rows.
            count: number of the steps.
            ratio: odds of ``kind`` relative to those before, by depth.
        """
        steps = len(ratio)
        for other, window in enumerate(self._windows):
            if other != kind:
                window.age(rows, count)
                odds = ratio * self._mean_odds(other, steps)
                results = self._mean_results[other, :steps]
                self._mean_accepted[other, :steps] = results * odds / (1 + odds)

    def _settle(self, exploration: _Exploration, place: int, seconds: float, tokens: int) -> None:
        """Charge an exploration that has come back for the time that it has lost."""
        exploration.steps += 1
        if exploration.place == place:
            lost = max(0.0, seconds - tokens * exploration.seconds_per_token)
            self._budget = max(self._budget - lost, -seconds)
            self._exploration = None
            self._decision = None  # the result counts at once
        elif exploration.steps > FORGOTTEN_STEPS:
            self._exploration = None

    def forget(self, row: int) -> None:
        self._fresh += 1
        self._have[row] = True  # nothing is known of it
        self._decision = None
        self._add_results()
        for window in self._windows:
            window.clear(row)
