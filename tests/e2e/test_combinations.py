"""Equal tokens on several ranks and with drafts as on one rank without: a sample here, the whole
matrix when slow.
"""

from __future__ import annotations

import pytest

from glowplug.core.errors import PlanRefused
from tests.support.combinations import (
    ABORTED,
    GAP,
    Combination,
    Reference,
    exchanges,
    matrix,
    reference,
    run,
    sample,
    trees,
)
from tests.support.slow_cases import some_slow

SAMPLED = sample(28, seed=20)  #: two of each layout
#: the second of each, except for an exchange that no other has
SLOW = [one for one in SAMPLED[14:] if one.exchange != "all_gather"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(tmp_path_factory.mktemp("reference"))


def test_the_reference_has_clear_winners_and_varied_events(known: Reference) -> None:
    assert known.gap > GAP, "a near tie may be decided differently on another number of ranks"
    assert known.preemptions > 0, "the pool has to be too small"
    ends = {id: one.finished.reason for id, one in known.collected.items() if one.finished}
    assert ends[ABORTED] == "abort" and list(ends.values()).count("stop") >= 2
    assert sum(len(one.tokens) for one in known.collected.values()) > 150


@pytest.mark.parametrize("one", some_slow(SAMPLED, SLOW), ids=lambda one: one.name)
def test_same_tokens(known: Reference, one: Combination) -> None:
    run(one, known)


OVER_GLOO = [
    Combination(tp=2, steps=1),
    Combination(tp=4, ep=4, dp=2, steps=2),
    Combination(tp=4, ep=4, dp=4, exchange="all_to_all"),
]


@pytest.mark.parametrize(
    "one",
    some_slow(OVER_GLOO, OVER_GLOO[1:2]),  # 10 s; the others have drafts and groups over gloo
    ids=lambda one: one.name,
)
def test_same_tokens_over_gloo(known: Reference, one: Combination) -> None:
    run(one, known, collectives={"use": "gloo", "timeout": 60.0})


COPIES = [
    Combination(tp=2, ep=2, steps=2, chunked=True, copies=2),
    Combination(tp=4, ep=4, dp=2, steps=1, exchange="all_to_all_static", copies=4),
    Combination(tp=4, ep=2, dp=4, chunked=True, copies=8),
    Combination(tp=4, ep=4, dp=4, steps=3, exchange="all_to_all", copies=24),
]


@pytest.mark.parametrize(
    "one",
    some_slow(COPIES, COPIES[::3]),  # tests/models/test_expert_placement.py has these exchanges
    ids=lambda one: one.name,
)
def test_same_tokens_with_copies_of_experts(known: Reference, one: Combination) -> None:
    run(one, known)


TREES = [
    Combination(steps=3, topk=4),
    Combination(steps=2, topk=3, radix=False, chunked=True),
    Combination(tp=2, steps=3, topk=2, chunked=True),
    Combination(tp=2, dp=2, steps=2, topk=4),
    Combination(tp=4, ep=2, dp=2, steps=3, topk=3),
    Combination(tp=4, ep=4, dp=4, steps=2, topk=2, overlap=False),
]


@pytest.mark.parametrize(
    "one",
    # without a cache, and in chunks on one rank: tests/e2e/test_standalone.py, test_nextn_trees.py
    some_slow(TREES, [TREES[1], TREES[4]]),
    ids=lambda one: one.name,
)
def test_same_tokens_with_trees_of_drafts(known: Reference, one: Combination) -> None:
    run(one, known)


def test_the_sample_covers_every_layout() -> None:
    everything = {(one.tp, one.ep, one.dp) for one in matrix() if one.fits}
    found = [one for one in SAMPLED if one not in SLOW]
    assert {(one.tp, one.ep, one.dp) for one in found} == everything
    assert {one.steps for one in found} == {0, 1, 2, 3}
    assert {one.exchange for one in found} == {"auto", "all_gather", "all_to_all"}
    for axis in ("radix", "chunked", "overlap"):
        assert {getattr(one, axis) for one in found} == {True, False}


@pytest.mark.parametrize(
    "one",
    [
        one
        for one in matrix() + exchanges()
        if not one.fits
        and (one.steps, one.radix, one.chunked, one.overlap)
        in ((0, True, False, True), (2, True, True, True))
    ],
    ids=lambda one: one.name,
)
def test_layouts_that_do_not_fit_are_refused(known: Reference, one: Combination) -> None:
    with pytest.raises(PlanRefused) as refused:
        run(one, known)
    assert all(refusal.fix for refusal in refused.value.refusals)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", sorted({(one.tp, one.ep, one.dp) for one in matrix() if one.fits}), ids=str
)
def test_every_combination(known: Reference, layout: tuple[int, int, int]) -> None:
    cells = [
        one
        for one in matrix() + exchanges() + trees()
        if one.fits and (one.tp, one.ep, one.dp) == layout
    ]
    assert len(cells) >= 32
    for one in cells:
        run(one, known)
