"""No request waits for a compiler: warm-up and captures have launched every variant that serving
launches.
"""

from __future__ import annotations

import json

import pytest

from tests.support import uninterpreted

pytest.importorskip("triton")


def test_warm_up_reaches_every_variant() -> None:
    """The script runs in a process of its own, in which Triton does not interpret."""
    *_, found = uninterpreted.printed("-m", "tests.kernels.launched_variants").splitlines()
    assert json.loads(found) == {"tokens": {}, "rows": {"16": {}, "128": {}}}
