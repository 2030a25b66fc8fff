"""Tensor parallelism in the plan: divisibility, refusals by name, and the collectives between
ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.layer_sizes import SplitDimension
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.splits import fitting_sizes, uneven
from glowplug.core.plugin.offers import QuantizationOffers
from tests.plan.test_refusals import component, with_components
from tests.support.reading import built_in, read_config, read_shape
from tests.support.tiny import CONFIGS, write_config


def shape(name: str) -> ModelFacts:
    return read_shape(name).facts


def tiny(name: str, **changes: Any) -> ModelFacts:
    return read_config({**CONFIGS[name], **changes}).facts


def tensor(size: int, **more: Any) -> dict[str, Any]:
    return {
        "parallel": [{"use": "tensor", "size": size}],
        "executor": {"oversubscribe": True},
        **more,
    }


def dimensions(found: list[SplitDimension]) -> list[tuple[str, str]]:
    return [(split.layer, split.dimension) for split in found]


def all_refusals(planned: Any, config: dict[str, Any], **more: Any) -> list[Refusal]:
    with pytest.raises(PlanRefused) as caught:
        planned(config, **more)
    return list(caught.value.refusals)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_the_dimensions_of_deepseek_v3() -> None:
    found = {(split.layer, split.full, split.unit) for split in shape("deepseek-v3").splits}
    assert found == {
        ("model.layers.0.self_attn.q_b_proj", 128, 192),
        ("model.layers.0.self_attn.kv_b_proj", 128, 256),
        ("model.layers.0.self_attn.o_proj", 128, 128),
        ("model.layers.0.mlp", 18432, 1),
        ("model.layers.3.mlp.experts", 2048, 1),
        ("model.layers.3.mlp.shared_experts", 2048, 1),
        ("model.embed_tokens", 129280, 1),
    }


def test_v3_in_blocks_of_128() -> None:
    """16 ranks hold one block of an expert each; 32 ranks would split it, unless experts are
    assigned by number.
    """
    v3 = shape("deepseek-v3")
    assert uneven(v3, {"tp": 16}, 128) == []
    assert dimensions(uneven(v3, {"tp": 32}, 128)) == [
        ("model.layers.0.mlp", "intermediate_size"),
        ("model.layers.3.mlp.experts", "moe_intermediate_size"),
        ("model.layers.3.mlp.shared_experts", "n_shared_experts x moe_intermediate_size"),
    ]
    assert fitting_sizes(v3, {"tp": 32}, 128)[:3] == [16, 8, 4] and uneven(v3, {"tp": 32}) == []
    assert dimensions(uneven(v3, {"tp": 32, "ep": 32, "dp": 32}, 128)) == [
        ("model.layers.0.mlp", "intermediate_size")
    ]
    assert uneven(v3, {"tp": 16, "ep": 16, "dp": 16}, 128) == []


def test_heads_split_where_their_rows_make_whole_blocks() -> None:
    """One head of V3's queries has 192 rows: two heads share three blocks, one alone would split a
    block.
    """
    v3 = built_in().complete(replace(shape("deepseek-v3"), n_routed_experts=0)).facts
    found = uneven(v3, {"tp": 128}, 128)
    assert ("model.layers.0.self_attn.q_b_proj", "num_attention_heads") in dimensions(found)
    assert "num_attention_heads" not in [split.dimension for split in uneven(v3, {"tp": 64}, 128)]


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_key_heads_are_repeated(kv_heads: int) -> None:
    facts = tiny("llama", num_attention_heads=8, num_key_value_heads=kv_heads)
    assert fitting_sizes(facts, {"tp": 8}) == [8, 4, 2, 1]


def test_key_heads_that_ranks_cannot_share() -> None:
    """There are 12 query heads for 4 key heads over 6 ranks: every other rank would need two key
    heads.
    """
    facts = tiny("llama", num_attention_heads=12, num_key_value_heads=4)
    assert dimensions(uneven(facts, {"tp": 6})) == [
        ("model.layers.0.self_attn.k_proj", "num_key_value_heads")
    ]
    assert fitting_sizes(facts, {"tp": 6}) == [4, 2, 1]


def test_a_vocabulary_need_not_divide() -> None:
    assert uneven(tiny("v3", vocab_size=157), {"tp": 4}) == []
    assert dimensions(uneven(tiny("v3", vocab_size=5), {"tp": 4})) == [
        ("model.embed_tokens", "vocab_size")
    ]


# ---- refusals ------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_are_named(planned: Any, tmp_path: Path) -> None:
    folder = str(write_config(tmp_path, "v3"))
    found = all_refusals(planned, {**tensor(8), "model": folder})
    assert [(r.by, r.field) for r in found] == [("tensor", "parallel.0.size")]
    assert (
        found[0].reason
        == "model.layers.0.self_attn.q_b_proj: num_attention_heads of 4 does not split over 8 ranks"
    )
    assert found[0].fix == "parallel.0.size = 4 (or 2, 1)"
    found = all_refusals(planned, {**tensor(3), "model": folder})
    assert [r.reason.partition(":")[0] for r in found] == [
        "model.layers.0.self_attn.q_b_proj",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts",
    ]


def test_whole_blocks_are_required_where_blocks_are_kept(planned: Any, tmp_path: Path) -> None:
    """The built-in scheme dequantises, so it splits anywhere; a scheme that keeps FP8 does not."""
    folder = str(write_config(tmp_path, "v3_fp8", intermediate_size=256))
    assert planned({**tensor(2), "model": folder}).mesh == {"tp": 2}
    offers = QuantizationOffers(reads=frozenset({"fp8"}), block_shape=(128, 128))
    own = with_components(quantization=[component("quantization", "kept", offers)])
    found = all_refusals(
        planned, {**tensor(2), "model": folder, "quantization": {"use": "kept"}}, plugins=own
    )
    reasons = {r.reason.partition(":")[0]: r.reason for r in found}
    assert "model.layers.0.mlp" not in reasons
    assert reasons["model.layers.1.mlp.experts"] == (
        "model.layers.1.mlp.experts: moe_intermediate_size of 128 gives each of 2 ranks "
        "64 channels, which splits the quantization's blocks of 128"
    )


def test_one_rank_is_never_refused(planned: Any, tmp_path: Path) -> None:
    plan = planned(
        {"parallel": [{"use": "tensor", "size": 1}], "model": str(write_config(tmp_path, "v3"))}
    )
    assert plan.ranks == 1 and plan.choice("collectives").name == "local"


@pytest.mark.parametrize(("sheet", "collectives"), [("cpu", "gloo"), ("4xh200", "peer_memory")])
def test_ranks_are_connected_by_their_devices_collectives(
    planned: Any, sheet: str, collectives: str
) -> None:
    plan = planned(tensor(2), hardware=read_sheet(sheet))
    assert plan.ranks == 2 and plan.choice("collectives").name == collectives


def test_backends_of_the_other_device_are_refused(refused: Any) -> None:
    found = refused({**tensor(2), "collectives": {"use": "nccl"}})["collectives.use"]
    assert "cuda" in found.reason and "gloo" in found.fix
