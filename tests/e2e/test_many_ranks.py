"""Layouts of 8 and 16 ranks yield one rank's tokens: a sample here, every layout when slow.

``python -m tests.support.combinations --parts layouts --output FILE`` runs all of them and keeps a
record.
"""

from __future__ import annotations

import pytest

from tests.support.combinations import (
    GAP,
    MANY,
    WIDE_SEED,
    WIDE_SHAPE,
    Combination,
    Reference,
    layouts,
    reference,
    run,
)
from tests.support.slow_cases import some_slow

SAMPLE = [
    Combination(8),
    Combination(8, ep=8, steps=1),
    Combination(8, ep=8, dp=8),
    Combination(16, ep=16, dp=2, chunked=True),
]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(tmp_path_factory.mktemp("reference"), WIDE_SHAPE, WIDE_SEED)


def test_the_reference_has_clear_winners(known: Reference) -> None:
    assert known.gap > GAP and known.preemptions > 0


@pytest.mark.parametrize("one", some_slow(SAMPLE, SAMPLE[:1]), ids=lambda one: one.name)
def test_same_tokens(known: Reference, one: Combination) -> None:
    run(one, known)


def test_same_tokens_over_gloo(known: Reference) -> None:
    run(Combination(8, ep=4, dp=2), known, collectives={"use": "gloo", "timeout": 60.0})


def test_every_size_of_blocks_and_groups_is_among_the_layouts() -> None:
    for tp in MANY:
        sizes = {0, *(size for size in (2, 4, 8, 16) if size <= tp)}
        found = {(one.ep, one.dp) for one in layouts() if one.tp == tp}
        assert found == {(ep, dp) for ep in sizes for dp in sizes}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tp", MANY)
def test_every_layout(known: Reference, tp: int) -> None:
    for one in layouts():
        if one.tp == tp:
            run(one, known)
