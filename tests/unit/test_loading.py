"""Loading reads every target exactly once, accounts for every tensor, and names the tensor at fault
in errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import model_facts, normalise
from glowplug.core.protocols import WeightTarget
from glowplug.core.startup.load_weights import load_model
from glowplug.core.testing.harness.build import DictSource, build_context, make, plan_for
from tests.support.tiny import CONFIGS


class Synthetic(DictSource):
    """A source that makes each requested tensor."""

    def __init__(self) -> None:
        super().__init__({})

    def read(self, target: WeightTarget) -> Tensor:
        self.read_names.append(target.name)
        value = torch.ones(target.shape)[target.index]
        return value if target.dtype is None else value.to(getattr(torch, target.dtype))


def facts_of(name: str, **changes: Any) -> ModelFacts:
    return model_facts(normalise({**CONFIGS[name], **changes}))


def build(facts: ModelFacts, quantization: str = "none") -> Any:
    context = build_context(facts, quantization=quantization)
    name = {"LlamaForCausalLM": "llama"}.get(facts.architecture, "deepseek_v3")
    return make("model", name, plan_for(facts), context.worker).build(context)


def tensors_for(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        target.name: torch.randn(target.shape, generator=generator) for target in model.targets()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_target_is_read_once(name: str) -> None:
    facts = facts_of(name)
    quantization = "block_fp8" if facts.quant_method == "fp8" else "none"
    source = Synthetic()
    model = build(facts, quantization)
    wanted = sorted(target.name for target in model.targets())
    load_model(model, source, facts)
    assert sorted(source.read_names) == wanted and len(set(wanted)) == len(wanted)


def test_published_tensor_names_are_loaded() -> None:
    """The tensor names are those of DeepSeek-V3's own checkpoint, FP8 scales included."""
    names = {target.name for target in build(facts_of("v3_fp8"), "block_fp8").targets()}
    for expected in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv",
        "model.layers.0.self_attn.q_a_layernorm.weight",
        "model.layers.0.self_attn.q_b_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        "model.layers.0.self_attn.kv_a_layernorm.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.0.self_attn.o_proj.weight_scale_inv",
        "model.layers.0.mlp.gate_proj.weight_scale_inv",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.7.down_proj.weight_scale_inv",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
    ):
        assert expected in names, expected
    assert (
        "model.layers.1.mlp.gate.weight_scale_inv" not in names
        and "lm_head.weight_scale_inv" not in names
    )


def test_missing_unexpected_and_misshapen_tensors_are_named_together() -> None:
    facts = replace(facts_of("llama"), path="/models/broken")
    model = build(facts)
    tensors = tensors_for(model)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    tensors["model.norm.weight"] = torch.ones(65)
    source = DictSource(tensors)
    with pytest.raises(WeightError) as caught:
        load_model(model, source, facts)
    message = str(caught.value)
    assert "/models/broken" in message
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "model.norm.weight is 65, LlamaForCausalLM needs 64" in message
    assert source.read_names == [], "nothing is read before every tensor is checked"


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_of_another_kind_of_number_is_refused(dtype: torch.dtype) -> None:
    facts = facts_of("llama")
    model = build(facts)
    source = DictSource({**tensors_for(model), "model.norm.weight": torch.ones(64).to(dtype)})
    stored = str(dtype).removeprefix("torch.")
    with pytest.raises(WeightError, match=f"1 of the wrong dtype: model.norm.weight is {stored}"):
        load_model(model, source, facts)
    assert source.read_names == []


def test_a_dtype_that_the_format_fixes() -> None:
    facts = facts_of("v3_fp8")
    model = build(facts, "block_fp8")
    tensors = tensors_for(model)  # float32, where the format has FP8
    with pytest.raises(
        WeightError, match=r"of the wrong dtype: .* is float32, DeepseekV3ForCausalLM needs float8"
    ):
        load_model(model, DictSource(tensors), facts)


def test_long_lists_are_cut() -> None:
    facts = facts_of("v3")
    model = build(facts)
    tensors = {name: t for name, t in tensors_for(model).items() if ".experts." not in name}
    with pytest.raises(WeightError, match=r"48 missing: .* and 40 more\. Fix: "):
        load_model(model, DictSource(tensors), facts)


def test_tensors_that_may_be_left_unread() -> None:
    facts = facts_of("llama")
    model = build(facts)
    tensors = tensors_for(model)
    tensors["lm_head.weight"] = torch.randn(160, 64)  # tied: a copy of the embedding
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)  # a multi-token-prediction layer
    load_model(model, DictSource(tensors), facts)
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(
        model.logits(hidden), hidden @ tensors["model.embed_tokens.weight"].t()
    )


def test_values_are_converted_to_the_compute_dtype() -> None:
    facts = facts_of("llama", tie_word_embeddings=False)
    model = build(facts)
    tensors = {name: t.bfloat16() for name, t in tensors_for(model).items()}
    load_model(model, DictSource(tensors), facts)
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(model.logits(hidden), hidden @ tensors["lm_head.weight"].float().t())


def test_progress_counts_tensors() -> None:
    facts = facts_of("llama")
    model = build(facts)
    seen: list[tuple[int, int]] = []
    load_model(
        model, DictSource(tensors_for(model)), facts, lambda done, total: seen.append((done, total))
    )
    assert seen[0] == (1, len(seen)) and seen[-1] == (len(seen), len(seen))


def test_a_name_requested_twice_is_our_error() -> None:
    facts = facts_of("llama")
    model = build(facts)
    model.layers.append(model.layers[0])
    with pytest.raises(WeightError, match="two targets of the model have the name"):
        load_model(model, Synthetic(), facts)
