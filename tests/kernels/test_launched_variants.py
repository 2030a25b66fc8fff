"""No request waits for a compiler: what serving launches, warm-up and captures have launched
before.
"""

from __future__ import annotations

import json

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")


def test_warm_up_reaches_every_variant() -> None:
    """In a process of its own, where Triton does not interpret."""
    *_, found = uninterpreted.printed("-m", "tests.kernels.launched_variants").splitlines()
    assert json.loads(found) == {"tokens": {}, "rows": {"16": {}, "128": {}}}
