"""The choice of the size of the drafts in each step: simulated speed, exploration, determinism."""

from __future__ import annotations

from functools import partial
from itertools import chain, product, repeat

import numpy as np
import pytest

from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape, shorter_shapes
from glowplug.core.speculation.adaptive import DECIDED_STEPS, EXPLORED, AdaptivePolicy
from glowplug.core.speculation.step_seconds import (
    FRESH_MEASUREMENTS,
    LEAST_KEPT,
    TRIES,
    StepSeconds,
)
from glowplug.core.step.draft_counts import rates_of_length
from tests.support.draft_simulation import (
    answer_speed,
    chain_costs,
    fixed_speed,
    gain,
    rate_of,
    simulate,
    speed,
)
from tests.support.slow_cases import some_slow_rows

SHAPES = shorter_shapes(DraftShape(3, 1, 4))
ROWS = (1, 4, 16, 64, 256)
LENGTHS = (1.0, 1.5, 1.85, 2.2, 2.6, 3.0, 3.5)
COSTS = {
    # like the V3 slice on an H200: a draft pass takes two thirds of a step without drafts
    "slice": chain_costs(SHAPES, 1.32e-3, 0.05e-3, 0.9e-3, 0.004e-3),
    # like a whole model, in which a draft pass is a small part of a step
    "model": chain_costs(SHAPES, 8e-3, 0.04e-3, 0.7e-3, 0.004e-3),
}
#: milliseconds of a step of the V3 slice on an H200 with none, one and three drafts, by rows
MEASURED = {
    1: (1.42, 2.66, 4.65),
    8: (3.43, 6.6, 11.56),
    32: (7.8, 12.67, 19.0),
    128: (12.05, 17.03, 26.2),
    256: (13.5, 20.0, 33.9),
}
LEAST = 0.97  #: share of the best fixed size's speed


def best_speed(costs: DraftCosts, rows: int, rate: float) -> float:
    """Return the speed of the best fixed size, none among them."""
    return max(fixed_speed(costs, shape, rows, rate) for shape in SHAPES)


def fixed_rate(rate: float, seconds: float) -> float:
    return rate


POINTS = list(product(COSTS, ROWS, LENGTHS))
#: lengths between others, except at one number of rows
SLOW_POINTS = [one for one in POINTS if one[1] != 16 and one[2] in (1.5, 2.2, 3.0)]


@pytest.mark.parametrize(("name", "rows", "length"), some_slow_rows(POINTS, SLOW_POINTS))
def test_adaptive_drafts_are_as_fast_as_the_best_fixed_ones(
    name: str, rows: int, length: float
) -> None:
    costs, rate = COSTS[name], rate_of(length, 3)
    policy = AdaptivePolicy(SHAPES, costs, 256)
    steps = simulate(
        policy, costs, repeat(rows, 4000 if rows < 16 else 1000), partial(fixed_rate, rate)
    )
    assert speed(steps) / best_speed(costs, rows, rate) >= LEAST


@pytest.mark.parametrize("length", [1.0, 1.85, 2.6, 3.5])
@pytest.mark.parametrize("name", COSTS)
def test_adaptive_drafts_follow_the_load(name: str, length: float) -> None:
    """From 1 request to 256 and back: no slower than the best fixed size at each load."""
    costs = COSTS[name]
    rate = rate_of(length, 3)
    climb = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    loads = list(chain.from_iterable(repeat(rows, 250) for rows in climb + climb[::-1]))
    steps = simulate(AdaptivePolicy(SHAPES, costs, 256), costs, iter(loads), lambda _: rate)
    seconds = sum(tokens / best_speed(costs, rows, rate) for _, rows, _, tokens in steps)
    assert seconds / sum(step[0] for step in steps) >= LEAST


@pytest.mark.parametrize("clocked", [False, True])
def test_short_answers_lose_little(clocked: bool) -> None:
    """Answers of 64 tokens, from 1 at a time to 256 and back, while the acceptance changes.

    Shares of single answers scatter, so a point counts with the mean of some runs.
    """
    costs = DraftCosts(
        tuple(
            ShapeCosts(
                shape, tuple(MEASURED), tuple(1e-3 * times[at] for times in MEASURED.values())
            )
            for at, shape in enumerate(SHAPES)
        )
    )
    climb = [*MEASURED, *reversed(list(MEASURED)[:-1])]
    shares: dict[tuple[float, int], list[float]] = {}
    for seed in range(5):
        policy = AdaptivePolicy(SHAPES, costs, 256, clocked)
        for load in MEASURED:
            answer_speed(costs, load, 64, (0.5, 0.5, 0.5), policy, seed)
        for length in (1.0, 1.85, 2.6, 3.5):
            rates = rates_of_length(length)
            for place, load in enumerate(climb):
                each = partial(answer_speed, costs, load, 64, (*rates, 0.0)[:3], seed=seed)
                best = max(each(shape) for shape in SHAPES)
                shares.setdefault((length, place), []).append(each(policy) / best)
    assert min(np.mean(found) for found in shares.values()) >= 0.96


def test_a_text_that_becomes_predictable_again_is_noticed() -> None:
    """One row whose text is predictable for 2 s, then random for 2 s, and so on."""
    costs = COSTS["slice"]

    def rate(seconds: float) -> float:
        return 0.95 if int(seconds / 2) % 2 else 0.1

    steps = simulate(AdaptivePolicy(SHAPES, costs, 8), costs, repeat(1, 4000), rate)
    clock = possible = 0.0
    for seconds, rows, _, _ in steps:
        possible += seconds * best_speed(costs, rows, rate(clock))
        clock += seconds
    assert sum(step[3] for step in steps) / possible >= 0.93
    fixed = [
        fixed_speed(costs, shape, 1, 0.95) + fixed_speed(costs, shape, 1, 0.1) for shape in SHAPES
    ]
    assert speed(steps) > max(fixed) / 2, "faster than any fixed size"


def test_explorations_lose_a_small_share_of_the_time() -> None:
    """Where no draft is ever accepted, drafts cost no more than ``EXPLORED``, and go on."""
    costs = COSTS["slice"]
    steps = simulate(AdaptivePolicy(SHAPES, costs, 8), costs, repeat(4, 5000), lambda _: 0.0)
    tried = [number for number, step in enumerate(steps) if step[2].steps]
    assert len(tried) > 10 and tried[-1] > 4000
    none = costs.of(NO_DRAFTS)
    assert none is not None
    lost = sum(step[0] for step in steps) - 5000 * none.at(4)
    assert lost <= 1.2 * EXPLORED * sum(step[0] for step in steps)


@pytest.mark.parametrize("rows", [1, 32])
def test_new_sequences_are_tried_at_once(rows: int) -> None:
    """Drafts come back soon with sequences that accept them, after others that accepted none."""
    policy = AdaptivePolicy(SHAPES, COSTS["slice"], 256)
    members = np.arange(rows, dtype=np.int32)
    for _ in range(400):
        shape = policy.choose(members, rows)
        policy.observe(members, shape, np.ones(rows, np.int32))
    assert shape == NO_DRAFTS
    for row in range(rows):
        policy.forget(row)
    tried = []
    for _ in range(60):
        tried.append(policy.choose(members, rows).steps)
        policy.observe(members, SHAPES[tried[-1] and 1], np.full(rows, 1 + min(tried[-1], 1)))
    assert any(tried[:2]), "the first steps of new sequences"
    assert rows == 1 or min(tried[20:]) > 0


def test_a_choice_holds_for_some_steps_of_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = AdaptivePolicy(SHAPES, COSTS["model"], 8)
    decided = []
    expected = policy.expected
    monkeypatch.setattr(
        policy, "expected", lambda rows: decided.append(len(rows)) or expected(rows)
    )
    rows = np.arange(4, dtype=np.int32)
    for _ in range(4 * DECIDED_STEPS):
        policy.observe(rows, policy.choose(rows, 4), np.full(4, 2, np.int32))
    assert 4 <= len(decided) <= 8
    policy.choose(rows[:3], 4)
    assert decided[-1] == 3, "other rows are decided on at once"
    policy.choose(rows[:3], 8)
    assert len(decided) <= 10 and decided[-2:] == [3, 3]


@pytest.mark.parametrize("length", [1.0, 1.2, 1.85, 3.0])
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_seconds_of_service_correct_those_of_the_start(rows: int, length: float) -> None:
    """Steps of a small model, whose seconds are the host's, and long sequences of a large one."""
    started = chain_costs(SHAPES, 0.3e-3, 0.2e-6, 0.15e-3, 0.2e-6)
    served = {
        "cheap drafts": chain_costs(SHAPES, 1.6e-3, 0.2e-6, 0.05e-3, 0.2e-6),
        "dear drafts": chain_costs(SHAPES, 0.6e-3, 8e-6, 0.3e-3, 2e-6),
        "far faster than at the start": chain_costs(SHAPES, 0.04e-3, 0.1e-6, 0.03e-3, 0.1e-6),
    }
    for name, costs in served.items():
        rate = rate_of(length, 3)
        policy = AdaptivePolicy(SHAPES, started, 256, clocked=True)
        steps = simulate(policy, costs, repeat(rows, 4000), partial(fixed_rate, rate))
        share = speed(steps[500:]) / best_speed(costs, rows, rate)
        assert share >= LEAST, (name, share)


def test_one_slow_step_of_a_size_does_not_exclude_it() -> None:
    policy = AdaptivePolicy(SHAPES, COSTS["model"], 4, clocked=True)
    rows = np.arange(4, dtype=np.int32)
    largest = SHAPES[-1]
    chosen = []
    for number in range(100):
        chosen.append(policy.choose(rows, 4))
        policy.took(4, largest, 1.0 if number % 9 == 5 else 11e-3)
        policy.observe(rows, largest, np.full(4, 4, np.int32))
    assert set(chosen[50:]) == {largest}
    assert chosen.count(NO_DRAFTS) == TRIES, "steps that measure a smaller size"


def test_seconds_of_a_size_that_was_not_measured_lately_no_longer_count() -> None:
    found = StepSeconds(np.array([[0.0, 1.0], [0.0, 2.0]]))
    for _ in range(LEAST_KEPT):
        found.add(1, 1, 7.0)
    found.refresh()
    assert found.at(1) == [6.0, 7.0], "the other size differs alike"
    for _ in range(FRESH_MEASUREMENTS):
        found.add(0, 1, 1.5)
    assert found.at(1) == [6.0, 7.0], "until the next decision"
    found.refresh()
    assert found.at(1) == [1.5, 2.5]


def test_seconds_of_the_start_may_be_many_times_too_long() -> None:
    """All sizes are then faster by the factor of the one that was measured in service."""
    found = StepSeconds(np.array([[0.0, 0.4], [0.0, 0.6]]))
    for _ in range(LEAST_KEPT):
        found.add(0, 1, 0.02)
    found.refresh()
    assert found.at(1) == pytest.approx([0.02, 0.03])


def test_rows_that_are_known_to_have_no_drafts_neither_count_nor_gain() -> None:
    policy = AdaptivePolicy(SHAPES, COSTS["model"], 4)
    rows = np.arange(4, dtype=np.int32)
    some = np.array([3, 3, 0, 0], np.int32)
    for _ in range(50):
        policy.expect(rows, some)
        policy.observe(rows, SHAPES[-1], 1 + some)
    policy.choose(rows, 4)
    assert 9 < policy.expected(rows)[-1] <= 10
    policy.expect(rows, np.full(4, 3, np.int32))
    assert policy.expected(rows)[-1] > 14, "rows without results are taken to be like the others"
    policy.expect(rows, np.zeros(4, np.int32))
    policy.forget(3)
    assert policy.expected(rows)[-1] > 4, "of another sequence nothing is known"


def test_one_unpredictable_row_does_not_decide_for_all() -> None:
    """The size follows the sum over the rows, each with its own acceptance."""
    policy = AdaptivePolicy(SHAPES, COSTS["model"], 4)
    rows = np.arange(4, dtype=np.int32)
    counts = np.array([4, 4, 4, 1], np.int32)
    for _ in range(50):
        policy.observe(rows, SHAPES[-1], counts)
    many = policy.expected(rows)
    alone = policy.expected(rows[3:])
    assert policy.choose(rows, 4) == SHAPES[-1]
    assert alone[-1] < 1.3 and many[-1] > 12
    policy.forget(3)  # another sequence enters the row: it is taken to be like the others
    assert policy.expected(rows[3:])[-1] > 2


def test_equal_results_give_equal_choices() -> None:
    """Ranks that see the same committed results choose alike."""
    runs = [
        simulate(
            AdaptivePolicy(SHAPES, COSTS["slice"], 64),
            COSTS["slice"],
            iter([1 + number % 50 for number in range(500)]),
            lambda _: 0.8,
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len({step[2] for step in runs[0]}) > 1


def test_trees_and_chains_have_rates_of_their_own() -> None:
    shapes = (NO_DRAFTS, DraftShape(1, 1, 2), DraftShape(2, 4, 8))
    costs = DraftCosts(tuple(ShapeCosts(shape, (1, 8), (1.0, 2.0)) for shape in shapes))
    policy = AdaptivePolicy(shapes, costs, 2)
    row = np.zeros(1, np.int32)
    for _ in range(60):
        policy.observe(row, shapes[1], np.ones(1, np.int32))
        policy.observe(row, shapes[2], np.full(1, 3, np.int32))
    expected = policy.expected(row)
    assert expected[0] == 1 and expected[1] < 1.1 and expected[2] > 2.8


TREES = shorter_shapes(DraftShape(3, 4, 8))
#: odds of a level of the tree relative to those of a chain's draft, as of NextN drafts of the
#: embedded model (accept length 2.85 beside 2.54)
TREE_ODDS = 1.5
#: a model whose further tokens cost little and one whose further tokens choose further experts
TREE_COSTS = {
    "cheap tokens": chain_costs(TREES, 8e-3, 2e-5, 2e-4, 4e-6),
    "dear tokens": chain_costs(TREES, 1.32e-3, 0.08e-3, 0.1e-3, 0.004e-3),
}


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(("name", "best"), [("cheap tokens", "3/4/8"), ("dear tokens", "3/1/4")])
def test_an_engine_with_trees_is_as_fast_as_its_best_size(name: str, best: str, rows: int) -> None:
    """A chain where the tree's further tokens cost more than they gain, else the tree."""
    costs = TREE_COSTS[name]
    chosen = set()
    for length in (1.0, 2.0, 3.0):
        rate = rate_of(length, 3)
        speeds = {shape: fixed_speed(costs, shape, rows, rate, TREE_ODDS) for shape in TREES}
        chosen.add(str(max(speeds, key=lambda shape: speeds[shape])))
        policy = AdaptivePolicy(TREES, costs, 64)
        loads = repeat(rows, 1000 if rows < 16 else 300)
        steps = simulate(policy, costs, loads, partial(fixed_rate, rate), tree_odds=TREE_ODDS)
        share = speed(steps) / max(speeds.values())
        assert share >= LEAST - 0.01, (length, share)  # two kinds have more to try than one
    assert rows > 1 or best in chosen, "the fastest size at one of the lengths"


def test_results_of_trees_also_show_how_chains_are_accepted() -> None:
    """After steps with trees alone, text that became predictable is so for chains as well."""
    policy = AdaptivePolicy(TREES, chain_costs(TREES, 8e-3, 2e-5, 2e-4, 4e-6), 1)
    row = np.zeros(1, np.int32)
    chain, tree = TREES[2:]
    for _ in range(60):
        policy.observe(row, chain, np.ones(1, np.int32))
        policy.observe(row, tree, np.full(1, 2, np.int32))
    policy.choose(row, 1)
    before = policy.expected(row)
    assert before[2] < 1.2 < before[3]
    for _ in range(300):
        policy.observe(row, tree, np.full(1, 4, np.int32))
    policy.choose(row, 1)
    after = policy.expected(row)
    assert 2 < after[2] < after[3] and after[3] > 3.6


@pytest.mark.parametrize(
    ("full", "tokens"),
    [
        (NO_DRAFTS, [1]),
        (DraftShape(1, 1, 2), [1, 2]),
        (DraftShape(2, 1, 3), [1, 2, 3]),
        (DraftShape(3, 1, 4), [1, 2, 4]),
        (DraftShape(7, 1, 8), [1, 2, 4, 8]),
        (DraftShape(3, 4, 8), [1, 2, 4, 8]),
        (DraftShape(5, 4, 8), [1, 2, 6, 8]),
        (DraftShape(5, 4, 6), [1, 2, 6]),
        (DraftShape(2, 4, 4), [1, 2, 3, 4]),
        (DraftShape(1, 4, 5), [1, 2, 5]),
        (DraftShape(1, 2, 2), [1, 2]),
        (DraftShape(5, 8, 64), [1, 2, 6, 64]),
    ],
)
def test_the_sizes_of_an_engine(full: DraftShape, tokens: list[int]) -> None:
    found = shorter_shapes(full)
    assert [shape.tokens for shape in found] == tokens
    assert found[-1] == full and not any(shape.is_tree for shape in found[:-1])
    assert [shape.steps for shape in found] == sorted(shape.steps for shape in found)


def test_simulated_lengths_are_those_requested() -> None:
    assert [round(gain(rate_of(length, 3), 3), 6) for length in LENGTHS] == list(LENGTHS)


@pytest.mark.parametrize("foreseen", (False, True))
def test_results_are_kept_when_their_memory_is_used_again(foreseen: bool) -> None:
    rows = np.arange(4, dtype=np.int32)
    policies = [AdaptivePolicy(SHAPES, COSTS["model"], 4) for _ in range(2)]
    for place, policy in enumerate(policies):
        for _ in range(40):
            shape = policy.choose(rows, 4)
            if foreseen:
                policy.expect(rows, np.ones(4, np.int32))
            counts = np.full(4, 1 + (shape.steps > 0), np.int32)
            policy.observe(rows, shape, counts)
            counts[:] = 0 if place else counts
    assert policies[0].expected(rows) == policies[1].expected(rows)
