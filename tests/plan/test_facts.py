"""Facts of model folders, machines and sheets: normalised, JSON both ways, errors by name, no
torch.
"""

from __future__ import annotations

import dataclasses
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import FactsError, WeightError
from glowplug.core.facts.machine import (
    _visible,
    own_sheet,
    read_sheet,
    sheet_names,
    software,
    this_machine,
)
from glowplug.core.facts.model_facts import Facts, HardwareFacts, ModelFacts
from glowplug.core.facts.model_folder import locate_model, normalise, read_folder
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from tests.support.reading import built_in, parameters, read_config, stored


def facts_of(folder: Path) -> ModelFacts:
    found = read_folder(folder, built_in().rules)
    assert found is not None
    return found


def test_a_deepseek_folder(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows = rng.randrange(1, 50)
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_model(
        tmp_path,
        {**TINY_V3, "quantization_config": quant, "num_nextn_predict_layers": 1},
        {
            "model.layers.0.w": ("F8_E4M3", (rows, 64)),
            "model.layers.3.w": ("BF16", (2, 3)),
            "lm_head": ("F32", (7,)),
        },
    )
    facts = facts_of(folder)
    assert (facts.kind, facts.kv_lora_rank, facts.qk_rope_head_dim, facts.head_dim) == (
        "mla",
        64,
        16,
        48,
    )
    assert (facts.quant_method, facts.quant_block, facts.nextn_layers) == ("fp8", (128, 128), 1)
    assert (facts.format, facts.n_routed_experts) == ("safetensors", 8)
    assert facts.config["topk_method"] == "noaux_tc" and facts.config["scoring_func"] == "sigmoid"
    assert stored(facts) == {
        ("whole", 0, False, -1): rows * 64 + 7,
        ("whole", 0, False, 0): 6,
    }


def test_a_llama_folder_and_one_without_next_token_layers(tmp_path: Path) -> None:
    facts = facts_of(write_model(tmp_path / "l", TINY_LLAMA))
    assert (facts.kind, facts.num_kv_heads, facts.head_dim, facts.format) == ("mha", 2, 16, "none")
    saved = facts_of(
        write_model(
            tmp_path / "v", {**TINY_V3, "num_nextn_predict_layers": 1}, {"x": ("F32", (1,))}
        )
    )
    assert saved.nextn_layers == 0 and "holds none" in saved.notes[0]


@pytest.mark.parametrize(
    ("stated", "scaling", "theta"),
    [
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 4}},
            {"type": "yarn", "rope_type": "yarn", "factor": 4},
            5.0,
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "llama3", "factor": 8}},
            {"type": "llama3", "rope_type": "llama3", "factor": 8},
            5.0,
        ),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, None, 5.0),
        ({"rope_scaling": None, "rope_theta": 5.0}, None, 5.0),
    ],
)
def test_rope_is_normalised(
    stated: dict[str, Any], scaling: dict[str, Any] | None, theta: float
) -> None:
    config = normalise(stated)
    assert (
        config["rope_scaling"] == scaling
        and config["rope_theta"] == theta
        and "rope_parameters" not in config
    )


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({}, "bfloat16"),
    ],
)
def test_dtype_is_normalised(stated: dict[str, Any], dtype: str) -> None:
    assert normalise(stated)["torch_dtype"] == dtype


@pytest.mark.parametrize(("groups", "method"), [(1, "greedy"), (8, "group_limited_greedy")])
def test_gate_of_v2(groups: int, method: str) -> None:
    stated = {"architectures": ["DeepseekV2ForCausalLM"], "n_group": groups}
    config = normalise(stated, built_in().rules)
    assert config["topk_method"] == method and config["scoring_func"] == "softmax"


def test_chat_templates(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_V3)
    assert facts_of(folder).chat_template == ""
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({"chat_template": [{"name": "default", "template": "D"}]}))
    assert facts_of(folder).chat_template == "D"
    tokenizer.write_text(json.dumps({"chat_template": "T<think>"}))
    assert facts_of(folder).chat_template == "T<think>"
    (folder / "chat_template.jinja").write_text("J")
    assert facts_of(folder).chat_template == "J"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"architectures": []}, "no architecture"),
        ({"quantization_config": {"weight_block_size": [128]}}, "weight_block_size"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = write_model(tmp_path, {**TINY_V3, **changes})
    with pytest.raises(FactsError, match=said.replace("[", r"\[")):
        read_folder(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", '{"a": NaN', "[" * 100_000])
def test_a_broken_config_is_named(tmp_path: Path, refused, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FactsError, match=r"config\.json"):
        read_folder(tmp_path)
    assert "config.json" in refused({"model": str(tmp_path)})["model"].reason


def test_a_truncated_checkpoint_is_refused_at_plan_time(tmp_path: Path, refused) -> None:
    folder = write_model(tmp_path, TINY_V3, {"model.embed_tokens.weight": ("BF16", (512, 128))})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError):
        read_folder(folder)
    found = refused({"model": str(folder)})["model"]
    assert (
        "model.safetensors" in found.reason and "incomplete download" in found.reason and found.fix
    )


def test_a_folder_without_a_config(tmp_path: Path, refused) -> None:
    assert read_folder(tmp_path) is None
    assert "no plugin reads a model" in refused({"model": str(tmp_path)})["model"].reason


def test_hub_names_are_found_only_when_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(FactsError) as caught:
        locate_model("some/model")
    assert "glowplug download some/model" in caught.value.fix
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    write_model(snapshot, TINY_V3)
    assert locate_model("some/model") == str(snapshot)
    for name in ("../model", "a/b/c", "~nobody/x"):
        with pytest.raises(FactsError):
            locate_model(name)


def test_facts_are_read_again_when_the_folder_changes(tmp_path: Path, plugins: PluginSet) -> None:
    folder = write_model(tmp_path, TINY_V3)
    first = plugins.read_model(str(folder))
    assert plugins.read_model(str(folder)) is first
    import os

    write_model(tmp_path, {**TINY_V3, "vocab_size": 777})
    os.utime(folder / "config.json", ns=(1, 1))
    assert plugins.read_model(str(folder)).facts.vocab_size == 777


def test_json_round_trip(tmp_path: Path) -> None:
    model = facts_of(write_model(tmp_path, TINY_V3, {"x": ("F8_E4M3", (3, 4))}))
    facts = Facts(model, read_sheet("2x8xh200"), software(["pluggy", "no-such-thing"]))
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts
    assert "pluggy" in facts.software.packages and "no-such-thing" not in facts.software.packages


# ---- machines ------------------------------------------------------------------------------------


def test_sheets(tmp_path: Path) -> None:
    assert sheet_names() == ["1xh200", "2x8xh200", "4xh200", "8xh200", "cpu"]
    counts = {
        name: (read_sheet(name).hosts, len(read_sheet(name).devices)) for name in sheet_names()
    }
    assert counts == {
        "1xh200": (1, 1),
        "2x8xh200": (2, 8),
        "4xh200": (1, 4),
        "8xh200": (1, 8),
        "cpu": (1, 0),
    }
    own = tmp_path / "mine.json"
    own.write_bytes(
        msgspec.json.encode(dataclasses.replace(read_sheet("cpu"), name="mine", cpu_cores=3))
    )
    assert read_sheet(str(own)).cpu_cores == 3


def test_the_connection_of_cards_is_read_from_a_sheet(tmp_path: Path) -> None:
    sheet = msgspec.json.decode(msgspec.json.encode(read_sheet("4xh200")))
    own = tmp_path / "mine.json"
    own.write_bytes(msgspec.json.encode({**sheet, "interconnect": "nvlink"}))
    assert read_sheet(str(own)) == read_sheet("4xh200")
    own.write_bytes(msgspec.json.encode({**sheet, "interconnects": "nvlink"}))
    with pytest.raises(FactsError, match="'interconnects'"):
        read_sheet(str(own))


def test_the_sheet_of_this_machine(tmp_path: Path) -> None:
    sheet = own_sheet(["pluggy", "no-such-thing"])
    assert (
        sheet.packages == {"no-such-thing": "", "pluggy": version("pluggy")}
        and sheet.name != this_machine().name
    )
    own = tmp_path / "mine.json"
    own.write_bytes(msgspec.json.encode(sheet))
    assert read_sheet(str(own)) == sheet
    assert dataclasses.replace(sheet, name=this_machine().name, packages=None) == this_machine()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"packages": ["triton"]}', "packages"),
        ('{"packages": {"triton": 3}}', "packages"),
        ('{"packages": {"triton": "new"}}', "'new', of triton, is not a version"),
        ('{"packages": {"triton>=3": "3.6"}}', "'triton>=3' is not the name"),
        ('{"packages": {"a_b": "1", "A-B": "2"}}', "a-b is stated twice"),
        ("{", "not valid"),
        ('{"hosts": "two"}', "hosts"),
        ('{"devcies": []}', "devcies"),
        ('{"devices": [{"name": "x", "memory": 1, "compute": 90, "sm": 9}]}', "'sm'"),
        ("[]", "not valid"),
    ],
)
def test_bad_sheets_are_named(tmp_path: Path, text: str, said: str) -> None:
    sheet = tmp_path / "s.json"
    sheet.write_text(text)
    with pytest.raises(FactsError, match=said):
        read_sheet(str(sheet))


def test_this_machine_is_plausible() -> None:
    machine = this_machine()
    assert (
        isinstance(machine, HardwareFacts)
        and machine.cpu_cores >= 1
        and machine.cpu_memory > 256 << 20
    )


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("GPU-b", ["1"]),
        ("1,9,0", ["1"]),
        ("-1", []),
    ],
)
def test_visible_devices(visible: str | None, chosen: list[str]) -> None:
    rows = [[str(i), f"GPU-{name}", "card", "1", "9.0"] for i, name in enumerate("abc")]
    assert [row[0] for row in _visible(rows, visible)] == chosen


def test_parameters_of_known_models() -> None:
    """DeepSeek-V3 has 671 billion parameters, Llama-3-8B 8.03 billion."""
    v3 = normalise(
        {
            **TINY_V3,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "vocab_size": 129280,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
    )
    llama = normalise(
        {
            **TINY_LLAMA,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "intermediate_size": 14336,
        }
    )
    assert parameters(read_config(v3).elements) == pytest.approx(671e9, rel=0.002)
    assert parameters(read_config(llama).elements) == pytest.approx(8.03e9, rel=0.002)
