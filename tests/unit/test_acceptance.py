"""Running acceptance of rows follows their last verify steps, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.speculation.acceptance import AcceptanceWindow

STEPS = 2000


def accepted_drafts(rng: np.random.Generator, rates: tuple[float, ...], count: int) -> np.ndarray:
    """Return how many drafts ``count`` verify steps accept, at ``rates`` per position."""
    return (rng.random((count, len(rates))) < rates).cumprod(1).sum(1)


def gained(accepted: list[int], depth: int) -> np.ndarray:
    """Return 1 where rows that accepted so many drafts accepted 0, 1, .. depth of them, else 0."""
    return (np.array(accepted)[:, None] >= np.arange(depth + 1)).astype(int)


def test_rates_are_those_of_the_drafts_that_were_reached() -> None:
    rng = np.random.default_rng(1)
    rates = np.array([(0.9, 0.5, 0.2), (0.3, 0.8, 0.6)])
    window = AcceptanceWindow(4, 3, 4 * STEPS)
    rows = np.array([3, 1])
    drawn = [accepted_drafts(rng, tuple(line), STEPS) for line in rates]
    for step in range(STEPS):
        window.add(rows, gained([line[step] for line in drawn], 3))
    assert np.abs(window.rates(rows) - rates).max() < 0.06
    assert (window.rates(np.array([0, 2]), prior=0.7) == 0.7).all(), "rows without a verify step"


def test_older_steps_count_less() -> None:
    window = AcceptanceWindow(1, 1, 50)
    row = np.array([0])
    for accepted in [1] * 500 + [0] * 50:
        window.add(row, gained([accepted], 1))
    assert window.rates(row)[0, 0] == pytest.approx(np.exp(-1), abs=0.01)


def test_a_shallower_step_says_nothing_about_deeper_drafts() -> None:
    window = AcceptanceWindow(1, 3, 100)
    row = np.array([0])
    for _ in range(20):
        window.add(row, gained([3], 3))
    for _ in range(20):
        window.add(row, gained([1], 1))
    assert window.rates(row).tolist() == [[1.0, 1.0, 1.0]]
    window.add(row, gained([0], 0))
    assert window.rates(row).tolist() == [[1.0, 1.0, 1.0]], "a step without drafts"


def test_a_cleared_row_begins_with_the_prior() -> None:
    window = AcceptanceWindow(2, 2, 100)
    rows = np.array([0, 1])
    for _ in range(10):
        window.add(rows, gained([2, 2], 2))
    window.clear(1)
    assert window.rates(rows, prior=0.25, weight=2.0)[1].tolist() == [0.25, 0.25]
    window.add(np.array([1]), gained([2], 2))
    assert window.rates(rows, prior=0.25, weight=2.0)[1] == pytest.approx([0.5, 0.5])


def test_steps_that_are_added_together_count_alike() -> None:
    """Rows that were in fewer steps keep more of their older ones."""
    together, apart = AcceptanceWindow(2, 2, 200), AcceptanceWindow(2, 2, 200)
    both, second = np.array([0, 1]), np.array([1])
    for window in (together, apart):
        window.add(both, gained([1, 0], 2))
    together.add(both, gained([2, 2], 2) + gained([-1, 2], 2), np.array([1, 2]))
    apart.add(both, gained([2, 2], 2))
    apart.add(second, gained([2], 2))
    assert together.rates(both) == pytest.approx(apart.rates(both), abs=0.02)
    assert together.rates(both)[0].tolist() == apart.rates(both)[0].tolist()


def test_the_prior_of_a_row_may_be_the_mean_of_all() -> None:
    window = AcceptanceWindow(3, 2, 200)
    rows = np.array([0, 1])
    window.add(rows, gained([2, 0], 2))
    found = window.rates(rows, np.array([0.5, 0.5]), 1e6, pooled=1.0)
    assert found == pytest.approx(np.array([[0.5, 0.75]] * 2), abs=1e-5)
