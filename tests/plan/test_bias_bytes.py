"""Biases that config.json states: bytes of the plan against those of the loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan
from tests.gpu.traced_memory import plugins_of_the_card
from tests.plan.test_eagle import LLAMA_HEAD, V3_HEAD
from tests.plan.test_rank_bytes import USES, compare
from tests.support.tiny import CONFIGS, write_config

ATTENTION = {"attention_bias": True}
MLP = {"mlp_bias": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, attention": ("llama", ATTENTION),
    "llama, feed-forward": ("llama", MLP),
    "v2, direct queries": ("v2", ATTENTION | MLP),
    "v3, latent queries, a draft": ("v3", {**ATTENTION, "num_nextn_predict_layers": 1}),
}
TARGETS = {"llama": TINY_LLAMA, "v3": TINY_V3}
MESHES = [{}, {"tp": 4, "dp": 2}]


@pytest.fixture(scope="module")
def threads() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


@pytest.fixture(scope="module")
def card() -> PluginSet:
    return plugins_of_the_card()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_budget_counts_biases_without_headers(
    case: str, mesh: dict[str, int], threads: PluginSet, tmp_path: Path
) -> None:
    name, changes = CASES[case]
    config: dict[str, Any] = {
        "model": str(write_config(tmp_path, name, **changes)),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "device": "cpu",
        "memory": {"kv_tokens": 256},
        "scheduler": {"max_running_requests": 2, "chunk_size": 8},
        "parallel": [{"use": USES[axis], "size": size} for axis, size in mesh.items()],
    }
    if "num_nextn_predict_layers" in changes:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": 2}
    plan = rank_plan(config, threads)
    with RankSet(plan, threads) as ranks:
        for rank, engine in enumerate(ranks.engines):
            compare(plan, engine, rank)


def bytes_of(line: str, folder: Path, card: PluginSet, **config: Any) -> int:
    """Return the bytes of a line of the plan for one H200."""
    common = {"model": str(folder), "weights": {"use": "random"}, "skip_tokenizer": True}
    planned = make_plan({**common, **config}, plugins=card, hardware=read_sheet("1xh200"))
    return next(one.bytes for one in planned.budget if one.name == line)


@pytest.mark.parametrize("scheme", ["block_fp8", "w8a8_int8"])
def test_biases_stay_in_the_compute_dtype_when_weights_are_quantised(
    scheme: str, tmp_path: Path, card: PluginSet
) -> None:
    found = [
        bytes_of(
            "weights",
            write_config(tmp_path / str(biased), "llama", hidden_size=128, attention_bias=biased),
            card,
            dtype="bfloat16",
            quantization={"use": scheme},
        )
        for biased in (False, True)
    ]
    config = CONFIGS["llama"]
    heads, keys, size = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = (heads + 2 * keys) * size + 128
    assert found[1] - found[0] == 2 * layer * config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("target", "head"), [("llama", LLAMA_HEAD), ("v3", V3_HEAD)], ids=["llama", "v3"]
)
def test_biases_of_an_eagle_head_count(
    target: str, head: dict[str, Any], planned: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "target", {**TARGETS[target], "num_hidden_layers": 6})
    found = []
    for changes in ({}, ATTENTION, MLP):
        draft = write_model(tmp_path / f"head{len(found)}", {**head, **changes})
        options = {"use": "eagle", "steps": 2, "draft_model": str(draft)}
        lines = planned({"model": str(folder), "speculative": options}).budget
        found.append(next(line.bytes for line in lines if line.name == "draft weights"))
    hidden, width = head["hidden_size"], head["intermediate_size"]
    if target == "llama":
        size = head["hidden_size"] // head["num_attention_heads"]
        attention = (head["num_attention_heads"] + 2 * head["num_key_value_heads"]) * size
    else:
        attention = head["kv_lora_rank"] + head["qk_rope_head_dim"] + (head["q_lora_rank"] or 0)
    assert found[1] - found[0] == 4 * (attention + hidden)
    assert found[2] - found[0] == 4 * (2 * width + hidden)
