"""Any rank that is killed, stopped, hung or fails, in any phase: the engine ends, names it and
leaves nothing behind.

Only the long test measures the time. The message shows that a dead rank is found before the
watchdog could find it silent.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rank_faults import CASES, HANGS, Case, rounds, run, total

SAMPLE = [
    Case("kill", "mid-replay", 1),
    Case("stop", "first step", 0),
    Case("error", "load", 1),
    Case("memory", "kv allocation", 0),
    Case("kill", "capture", 0),
]


@pytest.mark.parametrize("case", [*SAMPLE, HANGS[1]], ids=str)
def test_a_faulty_rank_ends_the_engine(case: Case, tmp_path: Path) -> None:
    assert run(case, tmp_path, watchdog=5.0).wrong(case) == []


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(7200)
def test_every_fault_ten_times() -> None:
    *_, rows = rounds([*CASES, *HANGS], 10)
    assert total(rows)["runs"] == 10 * len(rows)
    assert [
        (row["fault"], row["moment"], row["rank"], row["wrong"]) for row in rows if row["wrong"]
    ] == []
