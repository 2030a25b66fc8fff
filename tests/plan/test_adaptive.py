"""Plans with drafts whose size changes: sizes, table of costs, budget, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape, shorter_shapes
from glowplug.core.plugin.offers import SchedulerOffers
from glowplug.core.testing.harness.fakes import component
from tests.plan.test_refusals import with_components
from tests.support.tiny import write_config

Planned = Callable[..., EnginePlan]
CHAIN = DraftShape.chain(3)
H200 = read_sheet("1xh200")


@pytest.fixture
def drafting(tmp_path: Path) -> dict[str, Any]:
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    return {"model": str(folder), "speculative": {"use": "nextn", "steps": 3}}


def with_options(drafting: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**drafting, "speculative": {**drafting["speculative"], **options}}


def decision(plan: EnginePlan, field: str) -> Any:
    return next(one for one in plan.decisions if one.field == field)


def costs_of(*shapes: DraftShape) -> DraftCosts:
    return DraftCosts(tuple(ShapeCosts(shape, (1, 8), (1.0, 2.0)) for shape in shapes))


def test_steps_choose_among_sizes_by_default(planned: Planned, drafting: dict[str, Any]) -> None:
    plan = planned(drafting)
    assert plan.sizes.draft_shapes == (NO_DRAFTS, DraftShape.chain(1), CHAIN)
    assert plan.sizes.width == 4 and plan.draft_costs is None
    found = decision(plan, "speculative.adaptive")
    assert found.value is True and "none, 1/1/2, 3/1/4" in found.why
    assert EnginePlan.from_json(plan.to_json()) == plan


def test_one_size_without_adaptive(planned: Planned, drafting: dict[str, Any]) -> None:
    plan = planned(with_options(drafting, adaptive=False))
    assert plan.sizes.draft_shapes == (CHAIN,) == plan.sizes.step_shapes


def test_a_scheduler_with_one_size(planned: Planned, refused: Any, drafting: Any) -> None:
    """By default its steps have the configured drafts; ``adaptive = true`` is refused."""
    own = component("scheduler", "plain", SchedulerOffers())
    plugins = with_components(scheduler=[own])
    given = {**drafting, "scheduler": {"use": "plain"}}
    plan = planned(given, plugins=plugins)
    assert plan.sizes.draft_shapes == (CHAIN,)
    found = decision(plan, "speculative.adaptive")
    assert found.value is False and found.why == "plain has drafts of one size only"
    refusal = refused(with_options(given, adaptive=True), plugins=plugins)["speculative.adaptive"]
    assert "plain" in refusal.reason and refusal.fix.startswith("speculative.adaptive = false")
    planned(with_options(given, adaptive=False), plugins=plugins)


def test_a_given_table_replaces_the_measurement(
    planned: Planned, drafting: dict[str, Any], tmp_path: Path
) -> None:
    costs = costs_of(NO_DRAFTS, DraftShape.chain(1), DraftShape.chain(2), CHAIN)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.to_json()))
    plan = planned(with_options(drafting, cost_table=str(path)))
    assert plan.draft_costs == costs
    assert EnginePlan.from_json(plan.to_json()) == plan, "ranks on other hosts get it by the plan"
    fixed = planned(with_options(drafting, cost_table=str(path), adaptive=False))
    assert fixed.draft_costs is None
    assert "no effect: speculative.adaptive is false" in (
        decision(fixed, "speculative.cost_table").why
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("{}", "it is no table of costs"),
        (json.dumps(costs_of(NO_DRAFTS, CHAIN).to_json()), "no seconds for drafts of 1/1/2"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    refused: Any, drafting: dict[str, Any], tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    found: dict[str, Refusal] = refused(with_options(drafting, cost_table=str(path)))
    refusal = found["speculative.cost_table"]
    assert reason in refusal.reason and "glowplug tune speculative" in refusal.fix


def test_graphs_of_every_size_are_in_the_budget(planned: Planned, drafting: Any) -> None:
    def line(**options: Any) -> Any:
        config = {**with_options(drafting, **options), "dtype": "bfloat16"}
        plan = planned(config, hardware=H200)
        return next(line for line in plan.budget if line.name == "graphs")

    assert "each for 3 sizes of drafts" in line().how
    assert line().bytes > line(adaptive=False).bytes
    assert "sizes of drafts" not in line(adaptive=False).how


def test_options_without_drafts_have_no_effect(planned: Planned) -> None:
    plan = planned({"speculative": {"use": "none", "adaptive": True}})
    assert "no effect: nothing is drafted" in decision(plan, "speculative.adaptive").why
    assert plan.sizes.draft_shapes == (NO_DRAFTS,)


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_smaller_drafts_need_no_more_room(steps: int, topk: int) -> None:
    """The plan's lookahead, that of the largest drafts, is enough for every size."""
    for tokens in range(steps + 1, 65):
        full = DraftShape(steps, topk, steps + 1 if topk == 1 else tokens)
        for shape in shorter_shapes(full):
            assert shape.entries <= shape.tokens + full.lookahead
