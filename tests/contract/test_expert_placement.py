"""Placement of experts by load: the slots of each rank, and exchanges with copies of experts
against every expert on one rank.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from glowplug.core.facts.mesh import coordinates
from glowplug.core.testing.suites.parallel import ParallelSuite
from glowplug.plugins.parallel.ep_moe_runtime import EpMoe
from glowplug.plugins.parallel.expert_placement import (
    Placement,
    balancedness,
    count_copies,
    peak_load,
    place_experts,
    rank_loads,
)
from glowplug.plugins.parallel.placed_exchange import WAYS, PlacedExchange, slot_table
from tests.contract.test_ep_moe import (
    CASES,
    EXPERTS,
    Tokens,
    Weights,
    run_steps,
    steps_of,
    strategy,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("quick_switches")
LOAD = (900, 30, 500, 70, 0, 10, 260, 40)
RECORD = {"model": "m", "architecture": "Fake", "layers": {"m": LOAD}}


@st.composite
def layers(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Return the load of each expert, a number of redundant experts, and one of ranks."""
    ranks = draw(st.integers(1, 6))
    load = draw(st.lists(st.integers(0, 2000) | st.just(0), min_size=ranks, max_size=20))
    most = len(load) * (ranks - 1)
    fitting = [count for count in range(most + 1) if (len(load) + count) % ranks == 0]
    if not fitting:
        load = load[: len(load) - len(load) % ranks]
        fitting = [0]
    return tuple(load), draw(st.sampled_from(fitting)), ranks


def by_rank(slots: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    each = len(slots) // ranks
    return [slots[rank * each : (rank + 1) * each] for rank in range(ranks)]


# ---- the algorithm -------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(layers())
def test_every_expert_is_placed_and_no_rank_has_it_twice(
    layer: tuple[tuple[int, ...], int, int],
) -> None:
    load, redundant, ranks = layer
    slots = place_experts.__wrapped__(load, redundant, ranks)
    assert len(slots) == len(load) + redundant and set(slots) == set(range(len(load)))
    assert all(len(set(held)) == len(held) for held in by_rank(slots, ranks))
    assert slots == place_experts.__wrapped__(load, redundant, ranks)


@settings(max_examples=300, deadline=None)
@given(layers())
def test_placement_without_copies_is_no_worse_than_consecutive_experts(
    layer: tuple[tuple[int, ...], int, int],
) -> None:
    load, redundant, ranks = layer
    slots = place_experts(load, redundant, ranks)
    loads = rank_loads(load, slots, ranks)
    assert sum(loads) == pytest.approx(sum(load))
    if not redundant:
        assert peak_load(load, slots, ranks) <= peak_load(load, range(len(load)), ranks)


@settings(max_examples=200, deadline=None)
@given(layers())
def test_copies_go_to_the_greatest_load_per_copy(layer: tuple[tuple[int, ...], int, int]) -> None:
    """No copy moved from one expert to another lowers the greatest load per copy."""
    load, redundant, ranks = layer
    copies = count_copies(load, redundant, ranks)
    assert sum(copies) == len(load) + redundant and max(copies) <= ranks and min(copies) >= 1
    greatest = max(
        (count / held for count, held in zip(load, copies, strict=True) if held < ranks), default=0
    )
    for count, held in zip(load, copies, strict=True):
        if held > 1:
            assert count / (held - 1) >= greatest - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_skewed_loads_become_balanced(seed: int) -> None:
    """V3's 256 experts on 8 ranks with 32 copies, with loads as uneven as a Pareto distribution."""
    generator = torch.Generator().manual_seed(seed)
    load = tuple((1000 * torch.rand(256, generator=generator) ** -0.8).long().tolist())
    before = balancedness([(load, range(256))], 8)
    alone, copied = (
        balancedness([(load, place_experts(load, redundant, 8))], 8) for redundant in (0, 32)
    )
    assert before < 0.9 and alone > before and copied >= 0.98


def test_a_balanced_order_is_kept() -> None:
    """Packing the most loaded first would give one rank seven here."""
    assert place_experts((3, 3, 0, 2, 2, 2), 0, 2) == tuple(range(6))


def test_a_full_rank_makes_room_for_a_copy() -> None:
    """The last copy finds a free slot only on a rank with another copy of its expert."""
    for load in ((8, 8, 1), (9, 9, 9, 1, 1), (5, 4, 3, 2, 1, 0, 0)):
        for ranks in (2, 3, 4, 5):
            for redundant in range(len(load) * (ranks - 1) + 1):
                if (len(load) + redundant) % ranks == 0:
                    slots = place_experts(load, redundant, ranks)
                    assert all(max(Counter(held).values()) == 1 for held in by_rank(slots, ranks))


def test_layers_without_a_record_are_placed_evenly() -> None:
    placement = Placement(None, 4, 4)
    slots = placement.slots("model.layers.9.mlp", 8)
    assert slots is not None and sorted(Counter(slots).values()) == [1] * 4 + [2] * 4
    assert Placement(None, 0, 4).slots("m", 8) is None
    assert Placement(None, 0, 1).slots("m", 8) is None


def test_balancedness_adds_up_over_layers() -> None:
    assert balancedness([((4, 0), (0, 1)), ((1, 1), (0, 1))], 2) == pytest.approx(3 / 5)
    assert balancedness([((0, 0), (0, 1))], 2) == 1.0


class TestPlacedExperts(ParallelSuite):
    ranks = 4

    def make(self, rank: int) -> EpMoe:
        load = {**RECORD, "layers": {"model.moe": tuple(range(64))}}
        return strategy(rank, {"tp": 4, "ep": 2}, placement=load, redundant_experts=6)


# ---- slots of tokens -----------------------------------------------------------------------------


def placed(slots: tuple[int, ...], experts: int) -> PlacedExchange:
    moved = strategy(0, {"tp": 1, "ep": 1}, object()).expert_exchange("m", len(slots))
    assert moved is not None
    return PlacedExchange(slots, experts, "cpu", moved)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("redundant", [0, 4, 8])
def test_ids_become_slots_of_their_experts(redundant: int, dtype: torch.dtype) -> None:
    slots = place_experts(LOAD, redundant, 4)
    ids = tokens_of(200, torch.Generator().manual_seed(redundant), absent=0.3).ids.to(dtype)
    found = placed(slots, EXPERTS).slots_of(ids)
    back = torch.tensor([*slots, -1])[found]
    assert found.dtype == torch.int64 and torch.equal(back, ids.long())


def test_a_token_s_copies_follow_from_its_experts_alone() -> None:
    """Rows, neighbours and the order of the experts do not matter, and each copy gets its share."""
    slots = place_experts(LOAD, 8, 4)
    exchange = placed(slots, EXPERTS)
    generator = torch.Generator().manual_seed(3)
    ids = tokens_of(4000, generator).ids
    whole = exchange.slots_of(ids)
    order = torch.randperm(len(ids), generator=generator)
    assert torch.equal(exchange.slots_of(ids[order]), whole[order])
    assert torch.equal(exchange.slots_of(ids.flip(1)), whole.flip(1))
    assert torch.equal(exchange.slots_of(ids[7:8]), whole[7:8])
    used = torch.bincount(whole.flatten(), minlength=len(slots))
    assert bool((used > 0).all())


@pytest.mark.parametrize("redundant", [0, 8])
def test_an_exchange_with_a_kernel_is_given_experts_and_the_table(redundant: int) -> None:
    """Its kernel replaces them by slots, where it selects and counts; nothing does so before."""
    slots = place_experts(LOAD, redundant, 4)
    reference = placed(slots, EXPERTS)
    ids = tokens_of(50, torch.Generator().manual_seed(1), absent=0.3).ids
    moved = strategy(0, {"tp": 1, "ep": 1}, object()).expert_exchange("m", len(slots))
    calls: list[Any] = []

    def kernel(ids: Tensor, first: int, held: int, *more: Any) -> Tensor:
        calls.append((ids, more[-1]))
        return reference.slots_of(ids)

    cast(Any, moved)._rank_ids = kernel
    found = PlacedExchange(slots, EXPERTS, "cpu", cast(Any, moved)).select(ids, None)
    assert torch.equal(found, reference.select(ids, None))
    ((given, (table, ways)),) = calls
    assert given is ids
    assert table.tolist() == slot_table(slots, EXPERTS, ways)


def test_each_copy_has_its_share_of_the_ways() -> None:
    slots = (0, 1, 0, 2, 0, 1)
    table = slot_table(slots, 3, WAYS)
    shares = Counter(table[:WAYS])
    assert set(shares) == {0, 2, 4} and max(shares.values()) - min(shares.values()) == 1
    assert Counter(table[WAYS : 2 * WAYS]) == {1: WAYS // 2, 5: WAYS // 2}
    assert table[2 * WAYS :] == [3] * WAYS + [-1] * WAYS


# ---- exchanges against one rank ------------------------------------------------------------------


def extra(mesh: dict[str, int]) -> int:
    return EXPERTS if mesh["ep"] == 2 else 4


PLACED = [(mesh, exchange) for mesh, exchange in CASES if mesh["ep"] > 1]
OPTIONS = ["placement", "copies", "both"]


def options_of(kind: str, mesh: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"placement": RECORD, "redundant_experts": extra(mesh)}
    return {
        name: value
        for name, value in found.items()
        if kind == "both" or (kind == "placement") == (name == "placement")
    }


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("mesh", "exchange"), PLACED, ids=str)
def test_tokens_come_back_as_one_rank_computes_them(
    mesh: dict[str, int], exchange: str, kind: str
) -> None:
    """The load counts experts, each token once."""
    weights, steps = Weights(1), steps_of(mesh, seed=mesh["tp"] * 10 + mesh["ep"])
    found = run_steps("threads", mesh, exchange, steps, weights, **options_of(kind, mesh))
    for rank, (made, _) in enumerate(found):
        group = coordinates(rank, mesh)["dp"]
        for step, got in zip(steps, made, strict=True):
            torch.testing.assert_close(got, weights.apply(step[group]), atol=1e-5, rtol=1e-5)
    chosen = torch.cat([tokens.ids.flatten() for step in steps for tokens in step])
    counted = torch.stack([load for _, load in found if load is not None]).sum(0)
    assert torch.equal(counted, torch.bincount(chosen[chosen >= 0], minlength=EXPERTS))


@pytest.mark.parametrize(
    ("mesh", "exchange"), [(mesh, name) for mesh, name in PLACED if mesh["tp"] == 4], ids=str
)
def test_a_token_s_bits_do_not_depend_on_its_neighbours(
    mesh: dict[str, int], exchange: str
) -> None:
    """One token gives the same bits alone, between others, and last of many, in another group."""
    generator = torch.Generator().manual_seed(6)
    weights, probe, groups = Weights(4), tokens_of(1, generator, [0, 2, 6]), mesh.get("dp", 1)
    steps: list[list[Tokens]] = []
    places = [(place, group) for place in (0, 3, 16) for group in {0, groups - 1}]
    for place, group in places:
        step = [tokens_of(place + 1 + g % 2 * 4, generator) for g in range(groups)]
        step[group].x[place], step[group].ids[place], step[group].weights[place] = (
            probe.x[0],
            probe.ids[0],
            probe.weights[0],
        )
        steps.append(step)
    found = run_steps("threads", mesh, exchange, steps, weights, **options_of("both", mesh))
    ranks = {coordinates(rank, mesh)["dp"]: rank for rank in range(mesh["tp"])}
    bits = [found[ranks[group]][0][number][place] for number, (place, group) in enumerate(places)]
    assert all(torch.equal(one, bits[0]) for one in bits)


def test_ranks_share_the_tokens_of_a_loaded_expert() -> None:
    """With copies on all ranks no rank computes more than a third of what every token chooses."""
    load = (1000, 1, 1, 1, 1, 1, 1, 1)
    record = {**RECORD, "layers": {"m": load}}
    held = strategy(0, {"tp": 4, "ep": 4}, object(), placement=record, redundant_experts=4)
    moved = held.expert_exchange("m", EXPERTS)
    assert isinstance(moved, PlacedExchange)
    generator = torch.Generator().manual_seed(2)
    others = torch.stack([1 + torch.randperm(7, generator=generator)[:2] for _ in range(600)])
    ids = torch.cat([torch.zeros(600, 1, dtype=torch.int64), others], 1)
    slots = moved.slots_of(ids)[:, 0]
    assert torch.bincount(slots // 3, minlength=4).max() <= 200
