"""No request waits for a compiler: what serving launches, warm-up and captures have launched before."""
from __future__ import annotations

import json

import pytest

from tests import uninterpreted

pytest.importorskip("triton")


def test_warm_up_reaches_every_variant() -> None:
    """In a process of its own, where Triton does not interpret."""
    done = uninterpreted.run("-m", "tests.kernels.launched_variants")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"tokens": {}, "rows": {}}
