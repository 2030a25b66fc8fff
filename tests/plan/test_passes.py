"""The six passes on configurations that run: choices with reasons, precedence, sizes, the frozen
plan and its table.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from glowplug.core.facts.machine import read_sheet, sheet_names
from glowplug.core.facts.model_facts import Facts, HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plan.table import render, table
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.slots import SLOTS
from glowplug.core.testing.harness.fakes import TINY_V3, write_model

GIB = 1 << 30


def decision(plan: EnginePlan, field: str) -> tuple[object, str, str]:
    found = [d for d in plan.decisions if d.field == field]
    assert len(found) == 1, (field, found)
    return found[0].value, found[0].by, found[0].why


def test_every_slot_is_filled_and_every_auto_is_a_decision(planned) -> None:
    plan = planned()
    for slot in SLOTS:
        if slot.name != "outputs":
            assert plan.choice(slot.name).factory
        if slot.section and not slot.many:
            _, by, why = decision(plan, f"{slot.section}.use")
            assert by and why
    assert decision(plan, "attention.use")[:2] == ("torch_mla", "auto")
    assert decision(plan, "dtype")[:2] == ("float32", "auto")
    assert plan.mesh == {} and plan.ranks == 1 and plan.sizes.width == 1


def test_a_llama_gets_the_other_attention_and_the_reason(planned, llama: Path) -> None:
    value, by, why = decision(planned({"model": str(llama)}), "attention.use")
    assert (value, by) == ("torch_mha", "auto")
    assert "triton_mha runs on cuda, the device is cpu" in why and "mla" not in why


def test_the_checkpoints_own_quantization_is_chosen(planned, v3_fp8: Path, v3: Path) -> None:
    assert planned({"model": str(v3_fp8)}).choice("quantization").name == "block_fp8"
    assert planned({"model": str(v3)}).choice("quantization").name == "none"


@pytest.mark.parametrize(
    ("operator", "contributed", "value", "by"),
    [
        ({}, {}, "fcfs", "default"),
        ({}, {"policy.use": "priority"}, "priority", "entry point"),
        (
            {"policy": {"use": "longest_prefix"}},
            {"policy.use": "priority"},
            "longest_prefix",
            "operator",
        ),
    ],
)
def test_operator_over_contributed_over_default(planned, operator, contributed, value, by) -> None:
    assert decision(planned(operator, contributed=contributed), "policy.use")[:2] == (value, by)


def test_contributed_options_go_with_the_use_they_were_meant_for(planned) -> None:
    contributed = {"policy.use": "longest_prefix", "policy.window": 7}
    assert planned(contributed=contributed).choice("policy").options["window"] == 7
    assert planned({"policy": {"use": "fcfs"}}, contributed=contributed).choice(
        "policy"
    ).options == {"use": "fcfs"}


def test_a_plugin_contributes_for_these_facts(planned, cpu: HardwareFacts, v3: Path) -> None:
    from glowplug.core.plugin.hookspecs import hookimpl
    from glowplug.core.plugin.loading import PluginSource
    from glowplug.plugins.built_in import DEFAULT_PLUGINS

    class Contributor:
        @hookimpl
        def contribute_defaults(self, facts: Facts) -> dict[str, object]:
            return {"scheduler.chunk_size": 96} if facts.model.kind == "mla" else {}

    sources = [PluginSource(name, name) for name in DEFAULT_PLUGINS]
    own = PluginSet([*sources, PluginSource("mine", "", "mine", "1.0", loaded=Contributor())])
    plan = planned(plugins=own)
    assert plan.sizes.chunk_size == 96
    assert decision(plan, "scheduler.chunk_size") == (96, "mine", "contributed default")
    assert planned({"scheduler": {"chunk_size": 32}}, plugins=own).sizes.chunk_size == 32


def test_a_thinking_chat_template_brings_its_parser(planned, tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_V3)
    assert planned({"model": str(folder)}).choices_in("outputs") == ()
    (folder / "chat_template.jinja").write_text("{{ '<think>' }}")
    (folder / "config.json").touch()
    plan = planned({"model": str(folder)})
    assert [choice.name for choice in plan.choices_in("outputs")] == ["deepseek_r1"]
    assert decision(plan, "outputs.0.use")[1:] == (
        "glowplug.plugins.outputs.deepseek_r1",
        "contributed default",
    )
    assert planned({"model": str(folder), "outputs": []}).choices_in("outputs") == ()


def test_operator_values_keep_their_place(planned) -> None:
    plan = planned(
        {"server": {"port": 4}, "seed": 9},
        lines={"server.port": 12},
        origins={"seed": "--seed 9"},
        source="engine.toml",
    )
    assert decision(plan, "server.port") == (4, "operator", "engine.toml:12")
    assert decision(plan, "seed") == (9, "operator", "--seed 9")


def test_the_operators_config_is_not_written(
    planned, v3: Path, plugins: PluginSet, cpu: HardwareFacts
) -> None:
    config = {"model": str(v3), "weights": {"use": "random"}, "outputs": [{"use": "deepseek-r1"}]}
    before = repr(config)
    plan = make_plan(config, plugins=plugins, hardware=cpu)
    assert repr(config) == before
    assert plan.choices_in("outputs")[0].name == "deepseek_r1"  # by its alias
    assert plan.config["outputs"] == [{"use": "deepseek-r1"}]


def test_round_trip_through_json(planned) -> None:
    for config in (
        {},
        {"outputs": [{"use": "deepseek_r1"}], "server": {"cors_origins": ["http://a"]}, "seed": 5},
    ):
        plan = planned(config)
        assert EnginePlan.from_json(plan.to_json()) == plan


# ---- sizes ---------------------------------------------------------------------------------------


def test_kv_bytes_are_those_of_the_layout(planned) -> None:
    rng = random.Random(3)
    for _ in range(20):
        page, tokens = rng.choice([1, 8, 16, 64]), rng.randrange(100, 5000)
        plan = planned(
            {"attention": {"page_size": page}, "memory": {"kv_tokens": tokens}, "dtype": "bfloat16"}
        )
        token = (
            TINY_V3["num_hidden_layers"]
            * (TINY_V3["kv_lora_rank"] + TINY_V3["qk_rope_head_dim"])
            * 2
        )
        assert (plan.sizes.num_pages - 1) * page >= tokens > (plan.sizes.num_pages - 2) * page
        assert plan.sizes.kv_bytes == plan.sizes.num_pages * page * token
        assert plan.sizes.context_length == min(4096, (plan.sizes.num_pages - 1) * page - 1)
        assert plan.sizes.kv_bytes == next(
            line.bytes for line in plan.budget if line.name == "kv cache"
        )


def test_weights_come_from_the_headers_and_next_token_layers_stand_apart(
    planned, tmp_path: Path
) -> None:
    tensors = {
        "model.embed_tokens.weight": ("BF16", (512, 128)),
        "model.layers.0.x.weight": ("F8_E4M3", (128, 64)),
        "model.layers.3.eh_proj.weight": ("BF16", (128, 256)),
    }
    folder = write_model(tmp_path, {**TINY_V3, "num_nextn_predict_layers": 1}, tensors)
    plan = planned({"model": str(folder), "weights": {}})
    lines = {line.name: line.bytes for line in plan.budget}
    assert (
        lines["weights"] == 512 * 128 * 4 + 128 * 64
    )  # float32, and FP8 under a scheme that keeps FP8
    assert plan.facts.model.nextn_layers == 1 and "draft weights" not in lines
    assert plan.choice("weights").name == "safetensors"


def test_tiny_models_do_not_take_gigabytes_on_a_cpu(planned) -> None:
    plan = planned()
    assert plan.sizes.kv_bytes <= 4 * GIB
    assert plan.sizes.context_length == TINY_V3["max_position_embeddings"]
    assert sum(line.bytes for line in plan.budget) < GIB


def test_a_context_too_long_for_memory_is_shortened_with_a_remark(planned) -> None:
    plan = planned({"memory": {"kv_tokens": 512}})
    value, by, why = decision(plan, "context_length")
    assert (value, by) == (511, "size") and "4096" in why


@pytest.mark.parametrize("name", ["1xh200", "4xh200", "8xh200", "2x8xh200", "cpu"])
def test_ready_sheets_plan(planned, name: str) -> None:
    assert name in sheet_names()
    sheet = read_sheet(name)
    plan = planned(hardware=sheet)
    assert plan.device == sheet.device
    assert plan.dtype == ("float32" if name == "cpu" else "bfloat16")
    memory = sheet.devices[0].memory if sheet.devices else sheet.cpu_memory
    assert sum(line.bytes for line in plan.budget) <= memory


# ---- table ---------------------------------------------------------------------------------------


def test_the_table_shows_every_decision_and_every_budget_line(planned) -> None:
    plan = planned({"server": {"api_key": "very-secret"}})
    for width in (80, 120, 200):
        text = render(plan, width)
        lines = text.splitlines()
        for found in plan.decisions:
            assert any(line.startswith(found.field) for line in lines), found.field
        for line in plan.budget:
            assert f"memory: {line.name}" in text
        assert "very-secret" not in text
    assert max(map(len, render(plan, 160).splitlines())) <= 160


def test_a_long_choice_wraps_and_leaves_the_reasons_room() -> None:
    lines = [
        ("what", "choice", "by", "why", "bytes"),
        ("sizes", "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40,...", "size", "a", ""),
        ("memory: x", "", "size", "so many rows of so many tokens", "1.5 GiB"),
    ]
    found = list(table(lines, 90))
    assert found[0].index("bytes") - found[0].index("why") > 24 and max(map(len, found)) <= 90
    assert [line.split("  ")[0] for line in found] == ["what", "-" * 9, "sizes", "", "memory: x"]
    start = found[0].index("choice")
    assert (
        found[2][start:].startswith("1, 2, 3, 4, 6, 8, 12,  ")
        and found[3].strip() == "16, 24, 32, 40,..."
    )
    assert found[4].endswith("so many rows of so many tokens  1.5 GiB")
