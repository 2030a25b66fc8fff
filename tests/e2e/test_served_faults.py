"""A rank of ``glowplug serve`` that fails while requests run: the server says which and why, ends
with status 1, leaves nothing behind, and the next one serves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.served_faults import CASES, Case, run


@pytest.mark.parametrize(
    "case",
    [CASES[1], *(pytest.param(case, marks=pytest.mark.slow) for case in (CASES[2], CASES[-1]))],
    ids=str,
)
def test_a_faulty_rank_ends_the_server(case: Case, tmp_path: Path) -> None:
    assert run(case, tmp_path, "cpu", watchdog=5.0).wrong(case) == []
