"""Llama against transformers, float32, on random tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import COMMON, assert_parity, write

GQA: dict[str, Any] = dict(COMMON, num_key_value_heads=2, head_dim=16)
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "gqa_llama3_scaling": dict(GQA, rope_parameters=LLAMA3),
    "linear_scaling": dict(
        GQA, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "dynamic_scaling": dict(
        GQA, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "yarn": dict(
        GQA,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "tied": dict(GQA, tie_word_embeddings=True),
    "biases": dict(GQA, attention_bias=True, mlp_bias=True),
    "one_head_a_group": dict(COMMON, num_key_value_heads=4),
    "wide_heads": dict(GQA, head_dim=32, num_key_value_heads=1),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    assert_parity(write(tmp_path, "LlamaForCausalLM", seed=len(case), **CASES[case]), seed=11)
