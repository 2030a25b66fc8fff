"""Results of several steps that are counted together, against a count of each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.speculation.step_results import GainedTokens, StepResults

ROWS = 9


def expected(
    steps: list[tuple[list[int], list[int]]], ends: list[tuple[int, int]], depth: int
) -> tuple[dict[int, tuple[list[int], int]], list[float]]:
    """Return gained tokens and steps of each row, and the means, counted one by one."""
    rows: dict[int, tuple[list[int], int]] = {}
    means = [0.0] * (depth + 1)
    for number, (members, counts) in enumerate(steps):
        for row, count in zip(members, counts):
            for place in range(depth + 1):
                means[place] += (count > place) / len(members)
            if any(number < end and row == ended for end, ended in ends):
                continue
            gained, total = rows.setdefault(row, ([0] * (depth + 1), 0))
            rows[row] = [a + (count > b) for b, a in enumerate(gained)], total + 1
    return rows, means


def compared(found: GainedTokens) -> tuple[dict[int, tuple[list[int], int]], list[float]]:
    numbers = np.broadcast_to(found.steps, len(found.rows))
    rows = {
        int(row): (gained.tolist(), int(number))
        for row, gained, number in zip(found.rows, found.gained, numbers)
    }
    return rows, found.means.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_steps_of_changing_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(1, 4))
    results = StepResults()
    for _ in range(2):  # nothing is left of the first time
        steps: list[tuple[list[int], list[int]]] = []
        ends: list[tuple[int, int]] = []
        members = rng.permutation(ROWS)[: rng.integers(1, ROWS)]
        for _ in range(rng.integers(1, 8)):
            counts = rng.integers(0, depth + 2, len(members))
            results.add(members.astype(np.int32), counts.astype(np.int32))
            steps.append((members.tolist(), counts.tolist()))
            if seed % 3 and rng.random() < 0.7:
                members = rng.permutation(ROWS)[: rng.integers(1, ROWS)]
            if seed % 4 == 0:
                row = int(rng.integers(ROWS + 3))
                results.end(row)
                ends.append((len(steps), row))
        rows, means = compared(results.take(depth))
        wanted, wanted_means = expected(steps, ends, depth)
        assert rows == wanted
        assert means == pytest.approx(wanted_means)
        assert len(results) == 0


def test_an_end_before_the_first_step_changes_nothing() -> None:
    results = StepResults()
    results.end(1)
    results.add(np.array([1], np.int32), np.array([2], np.int32))
    assert compared(results.take(1)) == ({1: ([1, 1], 1)}, [1.0, 1.0])
