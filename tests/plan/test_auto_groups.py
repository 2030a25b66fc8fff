"""dp_attention's size "auto": groups or tensor parallelism, by the measured table of the layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolved import resolved_options
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.kernels.launch import tuned_tables
from glowplug.plugins.parallel.layout_table import (
    SPEEDS,
    file_name,
    measured_conditions,
    save_table,
)
from tests.plan.test_flags import given

CARD = "NVIDIA H200"
H200 = read_sheet("8xh200")
TP = {"use": "tensor", "size": 4}
EP = {"use": "ep_moe", "size": 2}
AUTO = {"use": "dp_attention", "size": "auto"}
#: 4 groups are faster from 64 requests on, 2 from 32 on
MEASURED = {
    8: {"1": 400.0, "2": 390.0, "4": 300.0},
    32: {"1": 900.0, "2": 950.0, "4": 700.0},
    64: {"1": 1200.0, "2": 1300.0, "4": 1400.0},
}
WHY = f"measured on {CARD}, 4 ranks, bfloat16, requests of 512 + 128 tokens"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder and a packaged one, both empty."""
    monkeypatch.setenv(tuned_tables.VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr(tuned_tables, "FOLDER", tmp_path / "packaged")
    for name in ("own", "packaged"):
        (tmp_path / name).mkdir()


@pytest.fixture
def plan_of(planned: Any) -> Any:
    def plan(*parallel: dict[str, Any], running: int | None = 64, **more: Any) -> EnginePlan:
        scheduler = {} if running is None else {"scheduler": {"max_running_requests": running}}
        config = {"dtype": "bfloat16", "parallel": list(parallel), **scheduler, **more}
        found: EnginePlan = planned(config, hardware=H200)
        return found

    return plan


def contents(plan: EnginePlan, **measured: Any) -> dict[str, Any]:
    """Return the table of the layout of ``plan``."""
    about = {"version": 1, **measured_conditions(plan), "input_len": 512, "output_len": 128}
    speeds = {str(requests): dict(row) for requests, row in MEASURED.items()}
    return {"measured": {**about, **measured}, SPEEDS: speeds}


def put(folder: Path, plan: EnginePlan, found: Any = None) -> Path:
    """Write the table of the layout of ``plan``, or ``found`` in its place."""
    path = folder / file_name(measured_conditions(plan))
    found = contents(plan) if found is None else found
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return path


def stated(plan: EnginePlan, number: int = 1) -> tuple[Any, str]:
    """Return the value and the reason of the decision for the number of groups."""
    ((value, by, why),) = [
        (one.value, one.by, one.why)
        for one in plan.decisions
        if one.field == f"parallel.{number}.size"
    ]
    assert by == "auto"
    return value, why


def test_without_a_table_the_plan_is_that_of_tensor_parallelism(plan_of: Any) -> None:
    plan, plain = plan_of(TP, AUTO), plan_of(TP)
    assert stated(plan) == (1, "no table for NVIDIA H200, 4 ranks, bfloat16: tensor parallelism")
    assert [one.name for one in plan.choices_in("parallel")] == ["tensor"]
    assert (plan.mesh, plan.sizes, plan.budget) == (plain.mesh, plain.sizes, plain.budget)
    assert plan.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("running", "groups", "reason"),
    [
        (8, 1, "dp_attention from 32 requests, at most 8 run: tensor parallelism"),
        (31, 1, "dp_attention from 32 requests, at most 31 run: tensor parallelism"),
        (32, 2, "dp_attention from 32 requests, at most 32 run"),
        (64, 4, "dp_attention from 64 requests, at most 64 run"),
        (None, 4, "dp_attention from 64 requests, at most 256 run"),
    ],
)
def test_a_table_decides_by_the_concurrent_requests(
    running: int | None, groups: int, reason: str, plan_of: Any, tmp_path: Path
) -> None:
    put(tmp_path / "own", plan_of(TP))
    plan = plan_of(TP, AUTO, running=running)
    assert stated(plan) == (groups, f"{WHY}: {reason}")
    if groups == 1:
        assert plan.mesh == {"tp": 4}
        return
    named = plan_of(TP, AUTO | {"size": groups}, running=running)
    assert plan.mesh == named.mesh == {"tp": 4, "dp": groups}
    assert (plan.sizes, plan.budget, plan.choices) == (named.sizes, named.budget, named.choices)
    assert plan.fingerprint == named.fingerprint


def test_groups_that_are_never_faster_are_not_taken(plan_of: Any, tmp_path: Path) -> None:
    found = contents(plan_of(TP))
    found[SPEEDS]["64"] = {"1": 1500.0, "2": 1300.0, "4": 1400.0}
    put(tmp_path / "own", plan_of(TP), found)
    reason = "dp_attention is not faster with 64 requests: tensor parallelism"
    assert stated(plan_of(TP, AUTO)) == (1, f"{WHY}: {reason}")


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "float16"},
        {"attention": {"kv_dtype": "fp8_e4m3"}},
        {"quantization": {"use": "w8a8_int8"}},
        {"speculative": {"use": "ngram", "steps": 2}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_another_layout_has_a_table_of_its_own(
    more: dict[str, Any], plan_of: Any, tmp_path: Path
) -> None:
    """The dtypes, the weights' format and drafts change the speeds; so do experts' ranks."""
    put(tmp_path / "own", plan_of(TP))
    value, why = stated(plan_of(TP, AUTO, **more))
    assert value == 1 and why.startswith("no table for")
    put(tmp_path / "own", plan_of(TP, **more))
    assert stated(plan_of(TP, AUTO, **more))[0] == 4


def test_experts_on_whole_ranks_have_a_table_of_their_own(plan_of: Any, tmp_path: Path) -> None:
    put(tmp_path / "own", plan_of(TP))
    assert stated(plan_of(TP, EP, AUTO), 2)[0] == 1
    put(tmp_path / "own", plan_of(TP, EP))
    plan = plan_of(TP, EP, AUTO)
    assert stated(plan, 2)[0] == 4 and plan.mesh == {"tp": 4, "ep": 2, "dp": 4}


def negative(plan: EnginePlan) -> dict[str, Any]:
    found = contents(plan)
    found[SPEEDS]["8"]["2"] = -1.0
    return found


BAD = [
    (lambda plan: json.dumps(contents(plan))[:200], "is not a table of measurements"),
    (lambda plan: contents(plan, version=2), "states version 2, not 1"),
    (lambda plan: contents(plan, card="NVIDIA H100"), "states card 'NVIDIA H100', not 'NVIDIA H2"),
    (lambda plan: contents(plan, layers=61), "states layers 61, not 3"),
    (negative, "is no table of layouts: output tokens/s of 8"),
    (
        lambda plan: contents(plan) | {SPEEDS: {"8": {"1": 1.0, "all": 2.0}}},
        "is no table of layouts: output tokens/s of 8",
    ),
    (
        lambda plan: contents(plan) | {SPEEDS: {"8": {"1": 1.0, "3": 2.0}}},
        "has 3 groups of 4 ranks",
    ),
    (
        lambda plan: contents(plan) | {SPEEDS: {"8": {"1": 1.0}, "16": {"2": 2.0}}},
        "does not compare layouts with groups and without",
    ),
    (lambda plan: contents(plan) | {SPEEDS: {}}, "does not compare layouts"),
]


@pytest.mark.parametrize(
    ("made", "reason"),
    BAD,
    ids="truncated version card layers negative named uneven apart empty".split(),
)
def test_a_bad_table_is_ignored_and_the_plan_says_so(
    made: Any, reason: str, plan_of: Any, tmp_path: Path
) -> None:
    path = put(tmp_path / "own", plan_of(TP), made(plan_of(TP)))
    value, why = stated(plan_of(TP, AUTO))
    assert value == 1 and why.startswith("no table for") and why.endswith(": tensor parallelism")
    assert str(path) in why and reason in why
    put(tmp_path / "packaged", plan_of(TP))
    value, why = stated(plan_of(TP, AUTO))
    assert value == 4 and why.startswith("measured on") and reason in why


def test_a_measured_record_is_kept_as_a_table(plan_of: Any, tmp_path: Path) -> None:
    speeds = {
        requests: {int(groups): speed for groups, speed in row.items()}
        for requests, row in MEASURED.items()
    }
    record = {"input_len": 512, "output_len": 128, "speeds": speeds, "card": "other", "x": 1}
    path = save_table(plan_of(TP, AUTO | {"size": 2}), record)
    assert path == put(tmp_path / "packaged", plan_of(TP)).parents[1] / "own" / path.name
    assert json.loads(path.read_text()) == contents(plan_of(TP))
    assert stated(plan_of(TP, AUTO))[0] == 4


@pytest.mark.parametrize(
    ("parallel", "field", "reason", "fix"),
    [
        ([AUTO], "parallel.0.use", "no strategy listed before it", '"tensor", size = 2 before it'),
        ([AUTO, TP], "parallel.0.use", "no strategy listed before it", "before it"),
        ([{"use": "tensor"}, AUTO], "parallel.1.size", "only one rank", "more tensor ranks"),
        ([TP, AUTO | {"size": "all"}], "parallel.1.size", "'all' is no number", 'or "auto"'),
        ([TP, AUTO | {"size": 0}], "parallel.1.size", "0 is no number", "from 1 on"),
    ],
)
def test_auto_without_tensor_ranks_is_refused(
    parallel: list[dict[str, Any]], field: str, reason: str, fix: str, planned: Any
) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned({"parallel": parallel}, hardware=H200)
    (refusal,) = caught.value.refusals
    assert (refusal.field, refusal.origin) == (field, "built in")
    assert reason in refusal.reason and fix in refusal.fix


STRATEGY = """
from typing import Literal
from glowplug.core.api import Component, ParallelOffers, ParallelOptions, hookimpl

class Options(ParallelOptions):
    use: Literal["cutting"] = "cutting"
    size: Literal["auto"] = "auto"

@hookimpl
def register_parallel_strategies():
    offers = ParallelOffers(axes=frozenset({"ep"}))
    return [Component(name="cutting", options=Options, offers=offers, factory="x:Y")]
"""


@pytest.fixture
def cutting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSet]:
    """The plugins, with a strategy whose size is "auto" and that does not decide it."""
    (tmp_path / "cutting_plugin.py").write_text(STRATEGY)
    monkeypatch.syspath_prepend(tmp_path)
    yield load_plugins(extra=("cutting_plugin",), entry_points=False)


def test_a_strategy_that_does_not_decide_its_size_is_refused(
    cutting: PluginSet, planned: Any
) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned({"parallel": [TP, {"use": "cutting"}]}, hardware=H200, plugins=cutting)
    (refusal,) = caught.value.refusals
    assert refusal.field == "parallel.1.size" and "does not offer auto_size" in refusal.reason
    assert refusal.origin != "built in"


@pytest.mark.parametrize(
    "words", [["--dp-size", "auto"], ["--enable-dp-attention", "--dp", "auto"]]
)
def test_flags_leave_the_groups_to_the_plan(words: list[str], plugins: PluginSet) -> None:
    found = given(plugins, "--tp", "2", *words)
    assert found.config["parallel"] == [{"use": "tensor", "size": 2}, AUTO]
    assert given(plugins, "--dp", "2").config["parallel"][0]["size"] == 2


def test_a_resolved_configuration_has_the_decided_groups(
    plan_of: Any, plugins: PluginSet, tmp_path: Path
) -> None:
    def sizes(plan: EnginePlan) -> dict[str, Any]:
        options = {one.path: one.value for one in resolved_options(plan, plugins)}
        return {path: value for path, value in options.items() if path.endswith(".size")}

    assert sizes(plan_of(TP, AUTO)) == {"parallel.0.size": 4}
    put(tmp_path / "own", plan_of(TP))
    assert sizes(plan_of(TP, AUTO)) == {"parallel.0.size": 4, "parallel.1.size": 4}
