"""DeepSeek models against transformers, float32, on random tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import MLA, YARN, assert_parity, write

V3: dict[str, Any] = dict(
    MLA,
    q_lora_rank=48,
    n_routed_experts=16,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=4,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    num_nextn_predict_layers=0,
)
V2: dict[str, Any] = dict(
    MLA,
    q_lora_rank=48,
    n_routed_experts=12,
    n_group=3,
    topk_group=2,
    num_experts_per_tok=3,
    n_shared_experts=2,
    routed_scaling_factor=1.6,
    topk_method="group_limited_greedy",
)
V2_LITE: dict[str, Any] = dict(
    V2,
    q_lora_rank=None,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    topk_method="greedy",
    num_experts_per_tok=6,
)
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

CASES = {
    "v3_groups_yarn": ("DeepseekV3ForCausalLM", dict(V3, rope_parameters=YARN)),
    "v3_one_group": (
        "DeepseekV3ForCausalLM",
        dict(V3, rope_parameters=PLAIN, n_group=1, topk_group=1),
    ),
    "v3_not_normalised": (
        "DeepseekV3ForCausalLM",
        dict(V3, rope_parameters=YARN, norm_topk_prob=False),
    ),
    "v3_direct_queries": (
        "DeepseekV3ForCausalLM",
        dict(V3, rope_parameters=YARN, q_lora_rank=None),
    ),
    "v3_attention_bias": (
        "DeepseekV3ForCausalLM",
        dict(V3, rope_parameters=PLAIN, attention_bias=True, q_lora_rank=None),
    ),
    "v3_not_interleaved": (
        "DeepseekV3ForCausalLM",
        dict(V3, rope_parameters=YARN, rope_interleave=False),
    ),
    "v3_tied": ("DeepseekV3ForCausalLM", dict(V3, rope_parameters=YARN, tie_word_embeddings=True)),
    "v2_groups_yarn": ("DeepseekV2ForCausalLM", dict(V2, rope_parameters=YARN)),
    "v2_lite": ("DeepseekV2ForCausalLM", dict(V2_LITE, rope_parameters=YARN)),
    "v2_lite_plain_rope": (
        "DeepseekV2ForCausalLM",
        dict(V2_LITE, rope_parameters=PLAIN, first_k_dense_replace=0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    assert_parity(write(tmp_path, architecture, seed=len(case), **config), seed=7)


def test_many_experts_few_hit(tmp_path: Path) -> None:
    """With 64 experts, GEMMs run over the chosen experts only."""
    config = dict(
        V3,
        rope_parameters=YARN,
        n_routed_experts=64,
        n_group=8,
        topk_group=4,
        moe_intermediate_size=16,
    )
    assert_parity(write(tmp_path, "DeepseekV3ForCausalLM", seed=3, **config), seed=3)


def test_published_rope_scaling_spelling(tmp_path: Path) -> None:
    """config.json is written as published (``rope_scaling``, ``type``), not as transformers now
    writes it.
    """
    import json

    reference = write(tmp_path, "DeepseekV3ForCausalLM", seed=5, **dict(V3, rope_parameters=YARN))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    file.write_text(json.dumps(config))
    assert_parity(reference, seed=5)
