"""A rank that is killed or stopped, or runs out of memory, while steps are replayed on two GPUs:
the other rank waits in a kernel, and the server ends all the same, with no memory left in use.

``python -m tests.e2e.served_faults --repeat 10 --output FILE`` runs each case ten times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.served_faults import CASES, RANKS, Case, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_faulty_rank_ends_the_server(case: Case, tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    assert run(case, tmp_path, "cuda").wrong(case) == []
    log = (tmp_path / "first" / "serve.log").read_text()
    assert "graphs take" in log and "graphs take no memory" not in log, "steps were not captured"
