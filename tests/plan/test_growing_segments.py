"""``memory.growing_segments`` in the plan: on by default for one rank on a CUDA device, off for
several with the reason; where it is requested and cannot work, a remark or a refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import BudgetLine, EnginePlan
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.core.testing.harness.fakes import component
from tests.gpu.traced_memory import written
from tests.plan.test_graphs import decided
from tests.plan.test_refusals import with_components

H200 = read_sheet("1xh200")
PATH = "memory.growing_segments"


def asked(planned: Any, value: Any, **more: Any) -> EnginePlan:
    plan = planned(
        {"dtype": "bfloat16", "memory": {} if value is None else {"growing_segments": value}},
        **more,
    )
    assert isinstance(plan, EnginePlan)
    return plan


def graphs(plan: EnginePlan) -> int:
    return next(line.bytes for line in plan.budget if line.name == "graphs")


@pytest.mark.parametrize("value", [None, "auto"])
def test_one_rank_has_it_by_default_and_the_plan_gives_the_reason(planned: Any, value: Any) -> None:
    plan = asked(planned, value, hardware=H200)
    found, by, why = decided(plan)[PATH]
    assert (
        plan.expandable_segments is True
        and (found, by) == (True, "size")
        and "KV cache gets more" in why
    )
    assert EnginePlan.from_json(plan.to_json()).expandable_segments is True


@pytest.mark.parametrize("value", [None, "auto"])
def test_several_ranks_use_them_like_one(planned: Any, value: Any) -> None:
    memory = {} if value is None else {"growing_segments": value}
    plan = planned(
        {"dtype": "bfloat16", "parallel": [{"use": "tensor", "size": 2}], "memory": memory},
        hardware=read_sheet("8xh200"),
    )
    found, by, why = decided(plan)[PATH]
    assert plan.expandable_segments is True
    assert (found, by) == (True, "size") and "the KV cache gets more" in why


@pytest.mark.parametrize("offered", [False, True])
def test_one_rank_beside_collectives_that_use_handles(planned: Any, offered: bool) -> None:
    own = component(
        "collectives",
        "alone",
        CollectiveOffers(devices=frozenset({"cuda"}), expandable_segments=offered),
    )
    plan = planned(
        {"dtype": "bfloat16", "collectives": {"use": "alone"}},
        hardware=H200,
        plugins=with_components(collectives=[own]),
    )
    assert plan.expandable_segments is offered
    assert ("alone shares memory by handles" in decided(plan)[PATH][2]) is not offered


@pytest.mark.parametrize("value", [True, False])
def test_a_requested_value_is_in_the_plan(planned: Any, value: bool) -> None:
    plan = asked(planned, value, hardware=H200)
    assert plan.expandable_segments is value and decided(plan)[PATH][:2] == (value, "operator")
    assert EnginePlan.from_json(plan.to_json()).expandable_segments is value


@pytest.mark.parametrize("value", [True, False])
def test_the_plans_json_has_the_options_name(planned: Any, value: bool) -> None:
    """The key that `glowplug check --json` prints and ranks read, whose place is unchanged."""
    plan = asked(planned, value, hardware=H200)
    keys = json.loads(plan.to_json())
    assert keys["growing_segments"] is value and "expandable_segments" not in keys
    assert list(keys).index("growing_segments") + 1 == list(keys).index("draft_choices")
    assert EnginePlan.from_json(plan.to_json()) == plan


def test_a_cpu_has_no_remark_by_default(planned: Any) -> None:
    plan = asked(planned, None)
    assert plan.expandable_segments is False and PATH not in decided(plan)


def test_a_request_on_a_cpu_is_reported_as_without_effect(planned: Any) -> None:
    plan = asked(planned, True)
    value, by, why = decided(plan)[PATH]
    assert plan.expandable_segments is False and (value, by) == (True, "operator")
    assert why.endswith("no effect: only allocators of CUDA devices have segments")


def test_only_the_bytes_of_graphs_and_cache_change(planned: Any, tmp_path: Path) -> None:
    """A tiny model's graphs need less than one segment; those of a published shape, whose blocks
    are large, gain.
    """

    def rest(plan: EnginePlan) -> list[BudgetLine]:
        return [line for line in plan.budget if line.name not in ("graphs", "kv cache")]

    off, on = (asked(planned, value, hardware=H200) for value in (False, True))
    assert graphs(off) < graphs(on) and rest(off) == rest(on)
    folder = written(tmp_path, "deepseek-v2-lite", 3)
    large = {
        "model": str(folder),
        "context_length": 32768,
        "scheduler": {"max_running_requests": 512},
    }
    off, on = (
        planned({**large, "memory": {"growing_segments": value}}, hardware=H200)
        for value in (False, True)
    )
    assert (
        graphs(on) < graphs(off)
        and rest(off) == rest(on)
        and on.sizes.num_pages > off.sizes.num_pages
    )


@pytest.mark.parametrize("offered", [False, True])
def test_collectives_that_share_torchs_memory_by_handles_refuse_it(
    planned: Any, refused: Any, offered: bool
) -> None:
    links = component(
        "collectives",
        "links",
        CollectiveOffers(devices=frozenset({"cuda"}), ranks=True, expandable_segments=offered),
    )
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "parallel": [{"use": "tensor", "size": 2}],
        "collectives": {"use": "links"},
        "memory": {"growing_segments": True},
    }
    more = {"plugins": with_components(collectives=[links]), "hardware": read_sheet("8xh200")}
    if offered:
        assert planned(given, **more).expandable_segments
        return
    found = refused(given, **more)[PATH]
    assert "links shares torch's memory" in found.reason and "leave it out" in found.fix
    for memory in ({}, {"growing_segments": "auto"}, {"growing_segments": False}):
        assert not planned({**given, "memory": memory}, **more).expandable_segments


def test_ranks_over_nccl_may_have_it(planned: Any) -> None:
    plan = planned(
        {
            "dtype": "bfloat16",
            "parallel": [{"use": "tensor", "size": 2}],
            "memory": {"growing_segments": True},
        },
        hardware=read_sheet("8xh200"),
    )
    assert plan.expandable_segments and plan.choice("collectives").name == "peer_memory"


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_other_values_are_refused(refused: Any, value: Any) -> None:
    assert "memory.growing_segments" in refused({"memory": {"growing_segments": value}})
