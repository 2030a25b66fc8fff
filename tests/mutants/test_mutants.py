"""Every planted fault is caught by the test that is named for it, and correct components pass."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.framework import Mutant, caught, failure, run
from tests.mutants.table import PAGE, mutants, page

MUTANTS = mutants()
LEAST = 80  #: planted faults


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one.slot}-{one.fault}")
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    assert caught(mutant), f"{mutant.by} passes although {mutant.fault}"


@pytest.mark.parametrize(
    ("suite", "test"),
    list(dict.fromkeys((one.correct, one.by) for one in MUTANTS)),
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_correct_component_trips_no_fault(suite: type, test: str) -> None:
    run(suite, test)


def test_a_caught_fault_is_reported_with_values() -> None:
    """Assertions of suites are rewritten, so that a third party reads what differs."""
    one = next(mutant for mutant in MUTANTS if mutant.fault == "a request is left out")
    assert "assert [" in str(failure(one)) and " == [" in str(failure(one))


def test_there_are_many_faults_and_each_is_listed_once() -> None:
    names = Counter((one.slot, one.fault) for one in MUTANTS)
    assert len(names) == len(MUTANTS) >= LEAST


def test_the_table_is_up_to_date() -> None:
    """``python -m tests.mutants.table`` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
