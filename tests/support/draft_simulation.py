"""Simulated decoding with drafts: given seconds of a step and given acceptance, no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.protocols import DraftPolicy

LAG = 1  #: steps in flight when the next one is chosen


def chain_costs(
    shapes: tuple[DraftShape, ...], base: float, row: float, draft: float, draft_row: float
) -> DraftCosts:
    """Return costs that grow linearly with the rows, for chains of drafts.

    Args:
        shapes: the sizes of the drafts.
        base: seconds of a step without drafts and rows.
        row: seconds of each token of the step.
        draft: seconds of each draft pass.
        draft_row: seconds of each row in a draft pass.
    """
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    return DraftCosts(
        tuple(
            ShapeCosts(
                shape,
                rows,
                tuple(
                    base + row * n * shape.tokens + shape.steps * (draft + draft_row * n)
                    for n in rows
                ),
            )
            for shape in shapes
        )
    )


def rate_of(length: float, steps: int) -> float:
    """Return the acceptance rate of each draft at which ``steps`` drafts gain ``length`` tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle, steps) < length else (low, middle)
    return (low + high) / 2


def gain(rate: float, steps: int) -> float:
    """Return the expected tokens of a row in a step of ``steps`` drafts."""
    return float(sum(rate**depth for depth in range(steps + 1)))


def with_odds(rate: float, factor: float) -> float:
    """Return the rate whose odds are those of ``rate`` times ``factor``."""
    return factor * rate / (1 - rate + factor * rate)


def fixed_speed(
    costs: DraftCosts, shape: DraftShape, rows: int, rate: float, tree_odds: float = 1.0
) -> float:
    """Return the tokens per second with drafts of one size; see ``simulate`` for the arguments."""
    found = costs.of(shape)
    assert found is not None
    level = with_odds(rate, tree_odds if shape.is_tree else 1.0)
    return rows * gain(level, shape.steps) / found.at(rows)


def simulate(
    policy: DraftPolicy,
    costs: DraftCosts,
    loads: Iterator[int],
    rate: Callable[[float], float],
    seed: int = 0,
    tree_odds: float = 1.0,
) -> list[tuple[float, int, DraftShape, int]]:
    """Return (seconds, rows, size of the drafts, tokens) of each step.

    Args:
        policy: the policy; it sees a step's results, and its seconds, ``LAG`` steps later.
        costs: seconds of the steps.
        loads: number of decoding rows of each step.
        rate: acceptance rate of each draft of a chain, as a function of the seconds so far.
        seed: seed of the acceptance.
        tree_odds: odds of a level of a tree, relative to those of a chain's draft.
    """
    random = np.random.default_rng(seed)
    flying: deque[tuple[np.ndarray, DraftShape, np.ndarray, float]] = deque()
    found = []
    clock = 0.0
    for load in loads:
        rows = np.arange(load, dtype=np.int32)
        shape = policy.choose(rows, load)
        level = with_odds(rate(clock), tree_odds if shape.is_tree else 1.0)
        hits = random.random((load, max(shape.steps, 1))) < level
        counts = 1 + hits.cumprod(1).sum(1) * (shape.steps > 0)
        entry = costs.of(shape)
        assert entry is not None
        clock += entry.at(load)
        found.append((entry.at(load), load, shape, int(counts.sum())))
        flying.append((rows, shape, counts.astype(np.int32), entry.at(load)))
        if len(flying) > LAG:
            ended, size, gained, seconds = flying.popleft()
            policy.took(len(ended), size, seconds)
            policy.observe(ended, size, gained)
    return found


def answer_speed(
    costs: DraftCosts,
    load: int,
    tokens: int,
    rates: Sequence[float],
    choice: DraftPolicy | DraftShape,
    seed: int = 0,
) -> float:
    """Return the tokens per second of ``load`` answers that begin together.

    Args:
        costs: seconds of the steps.
        load: number of answers; each leaves its row when it is complete.
        tokens: tokens of each answer; the first one is that of the prompt.
        rates: acceptance rate of each draft after those before it.
        choice: the policy, which sees a step's results ``LAG`` steps later, or one fixed size.
        seed: seed of the acceptance.
    """
    random = np.random.default_rng(seed)
    fixed = choice if isinstance(choice, DraftShape) else NO_DRAFTS
    policy = None if isinstance(choice, DraftShape) else choice
    rows = np.arange(load, dtype=np.int32)
    left = np.full(load, tokens - 1)
    flying: deque[tuple[np.ndarray, DraftShape, np.ndarray, float]] = deque()
    clock = 0.0
    for row in rows if policy is not None else ():
        policy.forget(int(row))
    while len(rows):
        shape = fixed if policy is None else policy.choose(rows, len(rows))
        hits = random.random((len(rows), len(rates))) < np.array(rates)
        counts = 1 + hits[:, : shape.steps].cumprod(1).sum(1)
        counts = np.minimum(counts, left[rows]).astype(np.int32)
        entry = costs.of(shape)
        assert entry is not None
        clock += entry.at(len(rows))
        left[rows] -= counts
        flying.append((rows, shape, counts, entry.at(len(rows))))
        rows = rows[left[rows] > 0]
        while policy is not None and len(flying) > (LAG if len(rows) else 0):
            ended, size, gained, seconds = flying.popleft()
            policy.took(len(ended), size, seconds)
            policy.observe(ended, size, gained)
    return load * (tokens - 1) / clock


def speed(steps: list[tuple[float, int, DraftShape, int]]) -> float:
    """Return the tokens per second of simulated steps."""
    return sum(step[3] for step in steps) / sum(step[0] for step in steps)
