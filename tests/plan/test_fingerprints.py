"""A plan's fingerprint depends on the model and the configuration, the API's on all that influences
answers, and on nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.fingerprint import answers_fingerprint, plan_fingerprint
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.plugin.slots import SLOTS
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from tests.plan.conftest import Planner
from tests.support.source_tree import ROOT

TENSORS = {
    "model.embed_tokens.weight": ("BF16", (512, 128)),
    "lm_head.weight": ("BF16", (512, 128)),
}
KEY = "a-key-that-nobody-sees"
H200 = read_sheet("1xh200")

#: changes of the configuration that do not influence answers
QUIET: list[dict[str, Any]] = [
    {"server": {"port": 4}},
    {"server": {"served_model_name": "x"}},
    {"log": {"level": "debug"}},
    {"metrics": {"enabled": False}},
    {"scheduler": {"max_queued_requests": 3}},
    {"policy": {"use": "priority"}},
    {"cache": {"use": "none"}},
    {"executor": {"use": "multiprocess"}},
    {"attention": {"kv_error": 0.5}},
    {"collectives": {"timeout": 7.0}},
]
#: changes of the configuration that influence answers
LOUD: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"attention": {"kv_dtype": "bfloat16"}},
    {"attention": {"use": "torch_mla", "absorb": False}},
    {"quantization": {"use": "w8a8_int8"}},
    {"seed": 5},
    {"weights": {"use": "random", "seed": 5}},
    {"outputs": [{"use": "deepseek_r1"}]},
    {"context_length": 100},
    {"server": {"default_max_tokens": 3}},
    {"parallel": [{"use": "tensor", "size": 2}]},
]


def both(plan: EnginePlan) -> tuple[str, str]:
    return plan.fingerprint, answers_fingerprint(plan)


def test_the_plan_has_its_own_fingerprint_and_its_plugins(planned: Planner, plugins: Any) -> None:
    plan = planned()
    assert plan.fingerprint == plan_fingerprint(plan) and re.fullmatch(
        "[0-9a-f]{16}", plan.fingerprint
    )
    assert plan.plugin_fingerprint == plugins.fingerprint != plan.fingerprint
    assert EnginePlan.from_json(plan.to_json()) == plan
    assert both(EnginePlan.from_json(plan.to_json())) == both(plan) == both(planned())


@pytest.mark.parametrize("change", [*QUIET, *LOUD], ids=json.dumps)
def test_every_change_of_the_configuration_changes_the_plans(
    planned: Planner, change: dict[str, Any]
) -> None:
    assert planned(change).fingerprint != planned().fingerprint


@pytest.mark.parametrize("change", QUIET, ids=json.dumps)
def test_the_apis_fingerprint_ignores_options_without_influence_on_answers(
    planned: Planner, change: dict[str, Any]
) -> None:
    assert answers_fingerprint(planned(change)) == answers_fingerprint(planned())


@pytest.mark.parametrize("change", LOUD, ids=json.dumps)
def test_the_apis_fingerprint_depends_on_options_that_change_answers(
    planned: Planner, change: dict[str, Any]
) -> None:
    assert answers_fingerprint(planned(change)) != answers_fingerprint(planned())


def test_all_these_configurations_have_fingerprints_of_their_own(planned: Planner) -> None:
    plans = [planned(change) for change in ({}, *QUIET, *LOUD)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert len({answers_fingerprint(planned(change)) for change in ({}, *LOUD)}) == len(LOUD) + 1


def test_speculation_the_tokenizer_and_the_engines_version_count_for_the_api(
    planned: Planner, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = write_model(tmp_path, {**TINY_V3, "num_nextn_predict_layers": 1})
    plan = planned({"model": str(folder)})
    drafting = planned({"model": str(folder), "speculative": {"use": "nextn"}})
    assert (
        len(
            {
                answers_fingerprint(plan),
                answers_fingerprint(drafting),
                answers_fingerprint(plan, "a tokenizer"),
                answers_fingerprint(plan, "another"),
            }
        )
        == 4
    )
    before = answers_fingerprint(plan)
    monkeypatch.setattr("glowplug.__version__", "9.9.9")
    assert answers_fingerprint(plan) != before and plan_fingerprint(plan) == plan.fingerprint


def test_writing_out_a_default_changes_no_fingerprint(planned: Planner) -> None:
    spelled = {
        "seed": 0,
        "dtype": "float32",
        "server": {"port": 30000},
        "cache": {"use": "radix"},
        "attention": {"use": "torch_mla", "absorb": True},
        "memory": {"reserve_bytes": 0},
    }
    assert both(planned(spelled)) == both(planned())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("torch_compile", "cache_dir"),
        ("ep_moe", "count_load"),
        ("gloo", "interface"),
        ("safetensors", "progress"),
    ],
)
def test_options_that_change_no_answer_are_marked(plugins: Any, name: str, key: str) -> None:
    options = {
        found.component.name: found.component.options
        for slot in SLOTS
        for found in plugins.components(slot.name)
    }
    assert key in options[name].marked("operational")


def test_the_folder_of_compiled_programs_does_not_count(planned: Planner) -> None:
    one, two = (
        planned({"ops": {"use": "torch_compile", "cache_dir": folder}}) for folder in ("/a", "/b")
    )
    assert (
        answers_fingerprint(one) == answers_fingerprint(two) and one.fingerprint != two.fingerprint
    )


def test_keys_are_part_of_no_fingerprint(planned: Planner) -> None:
    keys = [{"api_key": KEY}, {"api_key": "another"}, {"admin_api_key": KEY}, {}]
    plans = [planned({"server": key}) for key in keys]
    assert {both(plan) for plan in plans} == {both(planned())}


@pytest.mark.parametrize(
    "change", [{"hidden_size": 256}, {"rope_theta": 5.0}, {"num_hidden_layers": 4}]
)
def test_another_model_has_other_fingerprints(
    planned: Planner, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = planned({"model": str(write_model(tmp_path, {**TINY_V3, **change}))})
    assert all(one != two for one, two in zip(both(other), both(planned()), strict=True))


def checkpoint(planned: Planner, folder: Path) -> tuple[str, str]:
    """Return the fingerprints of a folder with weights, read anew."""
    return both(
        planned({"model": str(folder), "weights": {}}, plugins=load_plugins(entry_points=False))
    )


def test_the_content_of_a_checkpoint_counts_and_its_place_does_not(
    planned: Planner, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "one", TINY_V3, TENSORS)
    first = checkpoint(planned, folder)
    shutil.copytree(folder, tmp_path / "two")
    os.utime(tmp_path / "two" / "model.safetensors", (1, 1))
    assert checkpoint(planned, tmp_path / "two") == first
    tuned = tmp_path / "two" / "model.safetensors"
    data = bytearray(tuned.read_bytes())
    data[-1000:] = b"\1" * 1000  # weights of the same shapes
    tuned.write_bytes(data)
    second = checkpoint(planned, tmp_path / "two")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    third = checkpoint(planned, folder)
    for index in (0, 1):
        assert len({first[index], second[index], third[index]}) == 3


def test_the_place_of_a_draft_does_not_count(planned: Planner, tmp_path: Path) -> None:
    layer = {**TINY_V3, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    folders = [
        write_model(tmp_path / name, config)
        for name, config in (
            ("one", layer),
            ("two", layer),
            ("three", {**layer, "rope_theta": 5.0}),
        )
    ]
    found = [
        both(planned({"speculative": {"use": "nextn", "draft_model": str(folder)}}))
        for folder in folders
    ]
    assert found[0] == found[1]
    assert found[0][0] != found[2][0] and found[0][1] != found[2][1]


def test_cards_and_libraries_count_for_the_api_alone(planned: Planner) -> None:
    plan = planned({"dtype": "bfloat16"}, hardware=H200)
    card = replace(plan.facts.hardware.devices[0], name="another card")
    hardware = replace(
        plan, facts=replace(plan.facts, hardware=replace(plan.facts.hardware, devices=(card,)))
    )
    software = replace(
        plan,
        facts=replace(plan.facts, software=replace(plan.facts.software, packages={"torch": "9"})),
    )
    for other in (hardware, software):
        assert plan_fingerprint(other) == plan.fingerprint
        assert answers_fingerprint(other) != answers_fingerprint(plan)


def test_every_process_computes_the_same_fingerprints(planned: Planner, v3: Path) -> None:
    plan = planned({"server": {"cors_origins": ["http://a", "http://b"]}})
    code = (
        "import sys\nfrom glowplug.core.plan.fingerprint import answers_fingerprint\n"
        "from glowplug.core.facts.machine import read_sheet\n"
        "from glowplug.core.plugin.registry import load_plugins\n"
        "from glowplug.core.plan.resolve import plan\n"
        f"found = plan({{'server': {{'cors_origins': ['http://a', 'http://b']}}, 'model': "
        f"{str(v3)!r},\n"
        "    'weights': {'use': 'random'}}, plugins=load_plugins(entry_points=False), "
        "hardware=read_sheet('cpu'))\n"
        "assert 'torch' not in sys.modules\nprint(found.fingerprint, answers_fingerprint(found))"
    )
    for seed in ("1", "2"):
        environment = {
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONHASHSEED": seed,
            "PATH": "/usr/bin:/bin",
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment,
        )
        assert tuple(done.stdout.split()) == both(plan), done.stderr


def test_other_plugins_do_not_change_the_plans_fingerprint(planned: Planner, v3: Path) -> None:
    fewer = load_plugins(block=["glowplug.plugins.executors.ray_executor"], entry_points=False)
    plan = planned(plugins=fewer)
    assert (
        plan.fingerprint == planned().fingerprint
        and plan.plugin_fingerprint != planned().plugin_fingerprint
    )
