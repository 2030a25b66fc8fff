"""Placement of experts in the plan: the recorded load, redundant experts, refusals and remarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import ConfigError, PlanRefused, Refusal
from glowplug.core.facts.expert_load import ExpertLoad, recorded_load
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.fingerprint import answers_fingerprint
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plan.table import render
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_V3, component
from tests.plan.test_flags import given
from tests.plan.test_refusals import with_components
from tests.support.published import SLICE
from tests.support.source_tree import ROOT
from tests.support.tiny import write_config

Planner = Callable[..., EnginePlan]
ARCHITECTURE = TINY_V3["architectures"][0]
EXPERTS, LAYERS = TINY_V3["n_routed_experts"], TINY_V3["num_hidden_layers"]
ROUTED = range(TINY_V3["first_k_dense_replace"], LAYERS)


def record(
    folder: Path,
    layers: Sequence[int] = ROUTED,
    experts: int = EXPERTS,
    architecture: str = ARCHITECTURE,
    **more: Any,
) -> str:
    """Write a recorded load in which expert e has load (e + 1)^2, and return its path."""
    counts = [(expert + 1) ** 2 for expert in range(experts)]
    loads = {f"model.layers.{layer}.mlp": counts for layer in layers}
    content = {"model": "tiny", "architecture": architecture, "layers": loads, **more}
    path = folder / "load.json"
    path.write_text(json.dumps(content))
    return str(path)


def ranks(size: int = 4, tp: int = 4, **options: Any) -> dict[str, Any]:
    return {
        "parallel": [
            {"use": "tensor", "size": tp},
            {"use": "ep_moe", "size": size, **options},
        ]
    }


@pytest.fixture
def many(cpu: HardwareFacts) -> HardwareFacts:
    return replace(cpu, cpu_cores=64)


def refused(planned: Planner, config: dict[str, Any], **more: Any) -> list[Refusal]:
    with pytest.raises((PlanRefused, ConfigError)) as caught:
        planned(config, **more)
    return list(caught.value.refusals)


# ---- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "could not be read: No such file or directory"),
        ("[1, 2", "is no recorded load of experts: Invalid JSON"),
        ('{"logical_count": [[1, 2]]}', "is no recorded load of experts: model: Field required"),
        (
            '{"model": "m", "architecture": "A", "layers": {}}',
            "layers: Dictionary should have at least 1 item",
        ),
        (
            '{"model": "m", "architecture": "A", "layers": {"l": [1, -2]}}',
            "layers.l.1: Input should be greater than or equal to 0",
        ),
        (
            '{"model": "m", "architecture": "A", "layers": {"l": [1, 2.5]}}',
            "layers.l.1: Input should be a valid integer",
        ),
    ],
)
def test_a_file_that_holds_no_record_is_refused(
    planned: Planner, many: HardwareFacts, tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "input.json"
    if content is not None:
        path.write_text(content)
    (found,) = refused(planned, ranks(placement=str(path)), hardware=many)
    assert found.field == "parallel.1.placement" and reason in found.reason
    assert found.reason.startswith(str(path))
    assert "curl -s http://HOST:PORT/expert_load > FILE" in found.fix


@pytest.mark.parametrize(
    "value", [3, [], {}, {"use": None}, {"layers": {"x": 3}}, "~nobody/x", "a\0b", "a" * 300]
)
def test_a_value_that_is_no_record_is_refused(
    planned: Planner, many: HardwareFacts, value: Any
) -> None:
    (found,) = refused(planned, ranks(placement=value), hardware=many)
    assert found.field == "parallel.1.placement" and found.reason and "expert_load" in found.fix


def test_a_folder_is_no_record(planned: Planner, many: HardwareFacts, tmp_path: Path) -> None:
    (found,) = refused(planned, ranks(placement=str(tmp_path)), hardware=many)
    assert "Is a directory" in found.reason


def test_loads_of_ranks_add_up() -> None:
    info = {"ranks": [{"expert_load": {"a": [1, 2]}}, {"expert_load": {"a": [3, 4]}}]}
    load = recorded_load("m", "A", info)
    assert load == ExpertLoad(model="m", architecture="A", layers={"a": (4, 6)})
    assert recorded_load("m", "A", {"expert_load": {"a": [5]}}).layers == {"a": (5,)}  # type: ignore[union-attr]
    assert recorded_load("m", "A", {"kv_bytes": 1}) is None


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "DeepseekV2ForCausalLM"}, "a DeepseekV2ForCausalLM; the model is a"),
        ({"experts": EXPERTS * 2}, f"with {2 * EXPERTS} experts; this model has {EXPERTS}"),
        ({"layers": [*ROUTED, 30]}, f"in 3 layers, numbers {ROUTED[0]} to 30"),
        ({"layers": list(ROUTED)[1:]}, "this model has experts in 2 layers, numbers 1 to 2"),
    ],
)
def test_a_record_of_another_model_is_refused(
    planned: Planner,
    many: HardwareFacts,
    tmp_path: Path,
    changes: dict[str, Any],
    reason: str,
) -> None:
    path = record(tmp_path, **changes)
    (found,) = refused(planned, ranks(placement=path), hardware=many)
    assert found.field == "parallel.1.placement" and reason in found.reason
    assert "leave placement out" in found.fix
    planned(ranks(placement=record(tmp_path)), hardware=many)


@pytest.mark.parametrize(
    ("size", "redundant", "reason", "fix"),
    [
        (4, 3, "8 experts and 3 redundant ones cannot be divided evenly among 4 ranks", "0 or 4"),
        (4, 25, "8 experts on 4 ranks can have at most 24 copies", "20 or 24"),
        (2, 12, "8 experts on 2 ranks can have at most 8 copies", "6 or 8"),
        (1, 1, "8 experts on 1 rank can have at most 0 copies", "0"),
    ],
)
def test_redundant_experts_that_do_not_fit_are_refused(
    planned: Planner, many: HardwareFacts, size: int, redundant: int, reason: str, fix: str
) -> None:
    (found,) = refused(planned, ranks(size, redundant_experts=redundant), hardware=many)
    assert found.field == "parallel.1.redundant_experts" and reason in found.reason
    assert found.fix == f"parallel.1.redundant_experts = {fix}"
    for number in fix.split(" or "):
        planned(ranks(size, redundant_experts=int(number)), hardware=many)


def test_copies_make_experts_divide_evenly(
    plugins: PluginSet, many: HardwareFacts, tmp_path: Path
) -> None:
    """Six experts do not divide among four ranks; with two copies they do."""
    folder = write_config(tmp_path, "v3", n_routed_experts=6, n_group=1, topk_group=1)
    config = {"model": str(folder), "weights": {"use": "random"}, "skip_tokenizer": True}
    with pytest.raises(PlanRefused, match="6 experts cannot be divided evenly"):
        make_plan({**config, **ranks()}, plugins=plugins, hardware=many)
    make_plan({**config, **ranks(redundant_experts=2)}, plugins=plugins, hardware=many)


def test_a_size_that_does_not_divide_the_ranks_is_refused_too(
    planned: Planner, many: HardwareFacts
) -> None:
    found = refused(planned, ranks(3, redundant_experts=5), hardware=many)
    assert {one.field for one in found} == {"parallel.1.redundant_experts", "parallel.1.size"}


def test_schemes_of_consecutive_experts_are_refused(
    planned: Planner, many: HardwareFacts, tmp_path: Path
) -> None:
    """A third party's scheme that reads ``first`` and ``count`` would load other experts."""
    offers = QuantizationOffers(reads=frozenset({"none"}))
    plugins = with_components(quantization=[component("quantization", "consecutive", offers)])
    config = {**ranks(placement=record(tmp_path)), "quantization": {"use": "consecutive"}}
    (found,) = refused(planned, config, hardware=many, plugins=plugins)
    assert found.field == "quantization.use" and "does not offer places_experts" in found.reason
    planned({**config, **ranks()}, hardware=many, plugins=plugins)


# ---- decisions -----------------------------------------------------------------------------------


def remark(plan: EnginePlan) -> Decision:
    return next(one for one in plan.decisions if one.field == "parallel.1.balance")


def test_the_plan_states_the_balance_before_and_after(
    planned: Planner, many: HardwareFacts, tmp_path: Path
) -> None:
    plan = planned(ranks(placement=record(tmp_path), redundant_experts=4), hardware=many)
    found = remark(plan)
    counts = [(expert + 1) ** 2 for expert in range(EXPERTS)]
    before = sum(counts) / 4 / sum(counts[-2:])
    assert found.notable and f"{before:.1%} with consecutive experts" in found.why
    assert float(found.value.rstrip("%")) / 100 > 0.9 > before
    shown = " ".join(render(plan, 400).split())
    assert "8 experts and 4 copies, placed by the recorded load" in shown and "3 per block" in shown


def test_a_step_s_memory_follows_from_the_experts_of_a_rank(plugins: PluginSet) -> None:
    """Grouped GEMMs pad the rows of each expert, so further experts take memory in a step, too."""

    def lines(redundant: int) -> dict[str, int]:
        config = {"model": str(ROOT / SLICE), "weights": {"use": "random"}, "skip_tokenizer": True}
        strategies = ranks(8, 8, redundant_experts=redundant)
        plan = make_plan({**config, **strategies}, plugins=plugins, hardware=read_sheet("8xh200"))
        return {line.name: line.bytes for line in plan.budget}

    before, after = lines(0), lines(256)
    assert all(after[name] > before[name] for name in ("weights", "activations"))


def test_without_a_record_there_is_no_balance(planned: Planner, many: HardwareFacts) -> None:
    plan = planned(ranks(redundant_experts=4), hardware=many)
    assert not any(one.field.endswith("balance") for one in plan.decisions)
    assert "placed by number" in " ".join(render(plan, 400).split())


def test_one_share_has_no_use_for_a_record(
    planned: Planner, many: HardwareFacts, tmp_path: Path
) -> None:
    plan = planned(ranks(1, placement=record(tmp_path)), hardware=many)
    decision = next(one for one in plan.decisions if one.field == "parallel.1.placement")
    assert "no effect: each rank holds every expert" in decision.why
    assert not any(one.field.endswith("balance") for one in plan.decisions)


def test_ranks_get_the_record_with_the_plan(
    planned: Planner, many: HardwareFacts, tmp_path: Path
) -> None:
    """Ranks need no file, and its path counts for no fingerprint."""
    path = record(tmp_path)
    plan = planned(ranks(placement=path), hardware=many)
    Path(path).rename(tmp_path / "moved.json")
    received = EnginePlan.from_json(plan.to_json())
    options = received.choices_in("parallel")[1].options
    assert ExpertLoad.model_validate(options["placement"]).layers.keys() == {
        f"model.layers.{layer}.mlp" for layer in ROUTED
    }
    moved = planned(ranks(placement=str(tmp_path / "moved.json")), hardware=many)
    assert moved.fingerprint == plan.fingerprint
    other = planned(ranks(placement=record(tmp_path, model="other")), hardware=many)
    assert answers_fingerprint(other) != answers_fingerprint(plan)


def test_the_page_s_balances_are_those_of_its_record(plugins: PluginSet) -> None:
    page = (ROOT / "docs" / "ranks.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+%) \| (\d+) \| ([\d.]+ MiB) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for redundant, balance, each, weights in rows:
        words = ["--facts", "cpu", "--model", "embedded", "--tp", "2", "--ep-size", "2"]
        words += ["--init-expert-location", str(ROOT / "docs" / "recipes" / "expert-load.json")]
        plan = given(plugins, *words, "--ep-num-redundant-experts", redundant).plan()
        line = next(line for line in plan.budget if line.name == "weights")
        assert (remark(plan).value, human(line.bytes)) == (balance, weights)
        assert f"layout: experts {each} per block" in " ".join(render(plan, 400).split())
        assert "84.1% with consecutive experts" in remark(plan).why and "84.1%" in page


# ---- flags ---------------------------------------------------------------------------------------


def test_flags_of_other_engines_set_placement_and_copies(
    plugins: PluginSet, tmp_path: Path
) -> None:
    path = record(tmp_path)
    words = ["--tp", "4", "--ep-size", "4", "--init-expert-location", path]
    data = given(plugins, *words, "--ep-num-redundant-experts", "8").config
    section = {"use": "ep_moe", "size": 4, "placement": path, "redundant_experts": 8}
    assert data["parallel"][1] == section
    trivial = given(plugins, "--tp", "4", "--init-expert-location", "trivial").config
    assert trivial["parallel"][1] == {"use": "ep_moe", "size": 4, "placement": None}


def test_options_of_a_removed_strategy_are_noted(plugins: PluginSet) -> None:
    found = given(plugins, "--tp", "2", "--ep-size", "1", "--ep-num-redundant-experts", "8")
    assert found.config["parallel"] == [{"use": "tensor", "size": 2}]
    assert any(
        note.field == "--ep-num-redundant-experts 8" and note.value == "no effect"
        for note in found.notes
    )
