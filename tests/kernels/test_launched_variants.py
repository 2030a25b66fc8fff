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


SLOTS = """
from glowplug.kernels.mha import store
from glowplug.kernels.mla import cache_entries, prologue
for kernel in (store.mha_store_kernel, prologue._prologue, cache_entries._store,
               cache_entries._gather):
    for param in kernel.params:
        if param.name == "kv_slots":
            print(kernel.fn.__name__, param.do_not_specialize_on_alignment)
"""


def test_slots_that_begin_anywhere_need_no_further_variant() -> None:
    """With drafts and groups, a step of V3's slice waited 0.4 s for such a variant on an H200."""
    assert uninterpreted.printed("-c", SLOTS).splitlines() == [
        "mha_store_kernel True",
        "_prologue True",
        "_store True",
        "_gather True",
    ]
