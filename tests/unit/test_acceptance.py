"""Running acceptance of rows follows their last verify steps, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.speculation.acceptance import AcceptanceWindow

STEPS = 2000


def accepted_drafts(rng: np.random.Generator, rates: tuple[float, ...], count: int) -> np.ndarray:
    """Return how many drafts ``count`` verify steps accept, at ``rates`` per position."""
    return (rng.random((count, len(rates))) < rates).cumprod(1).sum(1)


def test_rates_are_those_of_the_drafts_that_were_reached() -> None:
    rng = np.random.default_rng(1)
    rates = np.array([(0.9, 0.5, 0.2), (0.3, 0.8, 0.6)])
    window = AcceptanceWindow(4, 3, 4 * STEPS)
    rows = np.array([3, 1])
    drawn = [accepted_drafts(rng, tuple(line), STEPS) for line in rates]
    for step in range(STEPS):
        window.add(rows, np.array([line[step] for line in drawn]))
    assert np.abs(window.rates(rows) - rates).max() < 0.06
    assert (window.rates(np.array([0, 2]), prior=0.7) == 0.7).all(), "rows without a verify step"


def test_older_steps_count_less() -> None:
    window = AcceptanceWindow(1, 1, 50)
    row = np.array([0])
    for accepted in [1] * 500 + [0] * 50:
        window.add(row, np.array([accepted]))
    assert window.rates(row)[0, 0] == pytest.approx(np.exp(-1), abs=0.01)


def test_a_shallower_step_says_nothing_about_deeper_drafts() -> None:
    window = AcceptanceWindow(1, 3, 100)
    row = np.array([0])
    for _ in range(20):
        window.add(row, np.array([3]))
    for _ in range(20):
        window.add(row, np.array([1]), depth=1)
    assert window.rates(row).tolist() == [[1.0, 1.0, 1.0]]
    window.add(row, np.array([0]), depth=0)
    assert window.rates(row).tolist() == [[1.0, 1.0, 1.0]], "a step without drafts"


def test_a_cleared_row_begins_with_the_prior() -> None:
    window = AcceptanceWindow(2, 2, 100)
    rows = np.array([0, 1])
    for _ in range(10):
        window.add(rows, np.array([2, 2]))
    window.clear(1)
    assert window.rates(rows, prior=0.25, weight=2.0)[1].tolist() == [0.25, 0.25]
    window.add(np.array([1]), np.array([2]))
    assert window.rates(rows, prior=0.25, weight=2.0)[1] == pytest.approx([0.5, 0.5])
