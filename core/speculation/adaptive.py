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
alike. A size is kept for several steps of about the same rows, the more the longer it has not
changed, and their results are counted together: with small models the host's time is that of the
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.speculation.acceptance import AcceptanceWindow
from glowplug.core.speculation.step_results import StepResults
from glowplug.core.speculation.step_seconds import LEAST_KEPT, StepSeconds

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]

EXPLORED = 0.008  #: share of the time that explorations may lose
LEAST_LOST = 0.1  #: least share of a step that an exploration loses, as its host work takes longer
#: least gain in expected tokens per second for which the drafts become smaller. An estimate that is
#: too high is corrected by the next results, one that is too low only by explorations.
HYSTERESIS = 0.01
ROW_STEPS = 70.0  #: verify steps of a row that count, about; older ones count less and less
MEAN_DECAY = 0.98  #: weight of the older results of all rows with each step
PRIOR_RESULTS = 4.0  #: results of a row that the mean of the step's rows counts like
POOLED_RESULTS = 4.0  #: results of the step's rows that the mean of all rows counts like
FIRST_RATE = 0.7  #: mean rate before any result
FIRST_RESULTS = 8.0  #: results that ``FIRST_RATE`` counts like
LEAST_RATE = 0.02  #: least mean rate whose odds count, and least distance from 1
#: most steps of about the same rows with one decision: choosing and counting take 0.1 ms of the
#: host. Each decision that changes nothing holds for twice as many steps as the one before
DECIDED_STEPS = 12
#: share of the rows that may join while a decision holds for all its steps
JOINED_ROWS = 1 / 8
#: share of the rows with whose leaving a decision ends, as at the end of a batch, but not before
#: its first ``LEFT_STEPS`` steps
LEFT_ROWS = 1 / 4
LEFT_STEPS = 3
PLAIN_STEPS = 64  #: most steps of about the same rows with one decision for none
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
    """A choice for several steps of about the same rows.

    Attributes:
        rows: number of rows.
        most: most decoding rows of any group.
        place: place of the size among the sizes.
        span: number of steps for which it holds.
        steps: steps so far.
        joined: sequences that have begun since.
    """

    rows: int
    most: int
    place: int
    span: int
    steps: int = 1
    joined: int = 0

    def fits(self, rows: int, most: int) -> bool:
        """Return whether a further step has about the rows for which the choice was made."""
        few = JOINED_ROWS * self.rows
        if self.joined > few or most > self.most + few:
            return False
        return self.steps < LEFT_STEPS or self.rows - rows < LEFT_ROWS * self.rows


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
        # NOTE: by tokens, as the hash of a shape takes 1 us
        self._places = {shape.tokens: place for place, shape in enumerate(shapes)}
        self._steps = [shape.steps for shape in shapes]
        self._make_estimates(rows)
        self._have = np.ones(rows, np.bool_)  # rows that have drafts for their next step
        self._foresees = False  # ``expect`` has been called
        self._chosen = 0
        self._decision: _Decision | None = None
        self._span = CHANGED_STEPS  # steps of a decision; it doubles while none changes the size
        self._budget = 0.0  # seconds that explorations may still lose
        self._share = 0.0  # seconds that a committed step adds to it
        self._exploration: _Exploration | None = None
        self._fresh = 0  # sequences that have begun since the last free exploration
        self._since_free = 0  # committed steps since then
        self._results = StepResults()
        self._results_of = 0  # place of the size of their steps

    def _make_estimates(self, rows: int) -> None:
        """Set up the estimates of acceptance: of ``rows`` rows, and the mean of all."""
        branches = sorted({shape.topk for shape in self.shapes if shape.steps})
        self._kinds = [branches.index(shape.topk) if shape.steps else 0 for shape in self.shapes]
        depth = max(*self._steps, 1)
        kinds = range(max(len(branches), 1))
        self._windows = [AcceptanceWindow(rows, depth, ROW_STEPS) for _ in kinds]
        #: results of all rows by depth, and accepted ones among them, [2, kinds, depth]
        self._means = np.full((2, len(kinds), depth), FIRST_RESULTS)
        self._means[1] *= FIRST_RATE

    def choose(self, rows: Ints, most: int) -> DraftShape:
        decision = self._decision
        if decision is not None and decision.steps < decision.span:
            if decision.fits(len(rows), most):
                decision.steps += 1
                return self.shapes[decision.place]
        else:  # if only the rows have changed, the results of the few steps so far can wait
            self._add_results()
            self._seconds.refresh()
        return self.shapes[self._decide(rows, most)]

    def _decide(self, rows: Ints, most: int) -> int:
        """Decide on a size by the results counted so far; arguments as in ``choose``.

        Returns:
            The place of that size, or of one to explore in this step alone.
        """
        seconds, expected = self._seconds.at(most), self.expected(rows)
        speeds = [tokens / time for tokens, time in zip(expected, seconds)]
        before = self._decision
        chosen = self._prefer(speeds)
        self._budget = min(self._budget, seconds[-1])
        self._share = EXPLORED * seconds[chosen]
        self._decision = decision = _Decision(len(rows), most, chosen, self._span)
        # not twice in a row: the results of the measuring steps arrive some steps later
        measures = self.clocked and (before is None or before.place >= chosen)
        smaller = self._seconds.unmeasured(len(rows), chosen) if measures else None
        if smaller is not None:
            self._span = CHANGED_STEPS
            decision.place = smaller
            decision.span = LEAST_KEPT
            return smaller
        if self._explores(decision, seconds, 1 / speeds[chosen]):
            return chosen + 1
        return chosen

    def _prefer(self, speeds: list[float]) -> int:
        """Choose the fastest size, and return its place. ``speeds``: expected tokens per second."""
        before, best = self._chosen, speeds.index(max(speeds))
        if best > before or speeds[best] > (1 + HYSTERESIS) * speeds[before]:
            self._chosen = best
        same = self._chosen == before
        self._span = min(2 * self._span, DECIDED_STEPS) if same else CHANGED_STEPS
        return self._chosen

    def _explores(self, decision: _Decision, seconds: list[float], each: float) -> bool:
        """Explore the size after the chosen one if its time may be spent; return whether it may.

        Args:
            decision: the choice. A choice of no drafts is extended until the time of the next
                exploration may be spent, since no results come before.
            seconds: seconds of a step of each size.
            each: seconds in which the chosen size gains a token.
        """
        rows = decision.rows
        wait = self._wait(rows, seconds, rows * each)
        if wait > 0:
            if not self._steps[decision.place]:
                decision.span = max(decision.span, min(int(wait) + 1, PLAIN_STEPS))
            return False
        self._exploration = _Exploration(decision.place + 1, each)
        if 2 * self._fresh >= rows and self._since_free >= FRESH_STEPS:
            self._fresh = self._since_free = 0
        return True

    def _wait(self, rows: int, seconds: list[float], usual: float) -> float:
        """Return the number of steps until the next larger size may be explored; 0 or less: now.

        Args:
            rows: number of rows.
            seconds: seconds of a step of each size.
            usual: seconds in which the chosen size gains one token for each row.
        """
        larger = self._chosen + 1
        if self._exploration is not None or larger == len(seconds):
            return PLAIN_STEPS
        lost = max(seconds[larger] - usual, LEAST_LOST * usual)
        wait = (lost - self._budget) / self._share
        return min(wait, FRESH_STEPS - self._since_free) if 2 * self._fresh >= rows else wait

    def expected(self, rows: Ints) -> list[float]:
        """Return the expected tokens of a step of ``rows`` for each size of the drafts."""
        gained = []
        accepted = self._means[1] / self._means[0]
        for window, prior in zip(self._windows, accepted):
            shares = window.rates(rows, prior, PRIOR_RESULTS, POOLED_RESULTS).cumprod(1)
            if self._foresees:
                shares = shares.compress(self._have[rows], 0)
            gained.append([0.0, *accumulate(shares.sum(0).tolist())])
        sizes = zip(self._kinds, self._steps)
        return [len(rows) + gained[kind][steps] for kind, steps in sizes]

    def observe(self, rows: Ints, shape: DraftShape, counts: Ints) -> None:
        place = self._places[shape.tokens]
        self._budget += self._share
        self._since_free += 1
        if self._exploration is not None:
            seconds = self._seconds.at(len(rows))[place]
            self._settle(self._exploration, place, seconds, int(counts.sum()))
        if not shape.steps:
            return
        if self._results_of != place:
            self._add_results()
            self._results_of = place
        # a copy, as results may be views of memory that later steps reuse
        self._results.add(rows, counts * self._have[rows] if self._foresees else counts.copy())
        if len(self._results) == DECIDED_STEPS:
            self._add_results()

    def expect(self, rows: Ints, drafts: Ints) -> None:
        """Note how many drafts rows have for their next steps; see ``protocols.DraftPolicy``."""
        self._have[rows] = drafts > 0
        self._foresees = True

    def took(self, rows: int, shape: DraftShape, seconds: float) -> None:
        self._seconds.add(self._places[shape.tokens], rows, seconds)

    def _add_results(self) -> None:
        """Count the tokens gained in the last steps in the estimates of acceptance."""
        steps = len(self._results)
        if not steps:
            return
        kind, depth = self._kinds[self._results_of], self._steps[self._results_of]
        several = len(self._windows) > 1
        before = self._mean_odds(kind, depth) if several else None
        found = self._results.take(depth)
        means = self._means[:, kind, :depth]
        means *= MEAN_DECAY**steps
        means[0] += found.means[:-1]
        means[1] += found.means[1:]
        self._windows[kind].add(found.rows, found.gained, found.steps)
        if before is not None:
            ratio = self._mean_odds(kind, depth) / before
            self._change_others(kind, found.rows, found.steps, ratio)

    def _mean_odds(self, kind: int, steps: int) -> Floats:
        """Return the odds that a draft of a kind is accepted, by depth, float64 [steps]."""
        results, accepted = self._means[:, kind, :steps]
        rates = (accepted / results).clip(LEAST_RATE, 1 - LEAST_RATE)
        odds: Floats = rates / (1 - rates)
        return odds

    def _change_others(self, kind: int, rows: Ints, steps: Ints, ratio: Floats) -> None:
        """Let the estimates of the other kinds follow new results of ``kind``.

        Args:
            kind: kind of the steps with results.
            rows: their rows.
            steps: number of steps that each of them was in.
            ratio: odds of ``kind`` relative to those before, by depth.
        """
        depth = len(ratio)
        for other, window in enumerate(self._windows):
            if other != kind:
                window.age(rows, steps)
                odds = ratio * self._mean_odds(other, depth)
                results, accepted = self._means[:, other, :depth]
                accepted[:] = results * odds / (1 + odds)

    def _settle(self, exploration: _Exploration, place: int, seconds: float, tokens: int) -> None:
        """Charge an exploration that has come back for the time that it has lost."""
        exploration.steps += 1
        if exploration.place == place:
            lost = seconds - tokens * exploration.seconds_per_token
            self._exploration = None
            if lost > 0:
                self._budget = max(self._budget - max(lost, LEAST_LOST * seconds), -seconds)
            else:
                self._decision = None  # the result counts at once
        elif exploration.steps > FORGOTTEN_STEPS:
            self._exploration = None

    def forget(self, row: int) -> None:
        self._fresh += 1
        self._have[row] = True  # nothing is known of it
        if self._decision is not None:
            self._decision.joined += 1
        self._results.end(row)
        for window in self._windows:
            window.clear(row)
