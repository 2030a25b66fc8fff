"""The shipped checkpoint: its size, names, shapes and dtypes as DeepSeek publishes them, FP8
blocks, tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import safetensors
import torch

from glowplug.models import embedded
from glowplug.models.embedded.training import tokenizer
from glowplug.models.embedded.training.shape import BLOCK, NetworkShape

HOME = Path(embedded.__file__).resolve().parent
FOLDER = HOME / "checkpoint"
LIMIT = 16 * 10**6


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    with safetensors.safe_open(FOLDER / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def projections(c: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return every FP8 matrix by its published name."""
    hidden, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    found = {}
    for layer in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found[f"{attention}.q_a_proj"] = (c["q_lora_rank"], hidden)
        found[f"{attention}.q_b_proj"] = (heads * (nope + rope), c["q_lora_rank"])
        found[f"{attention}.kv_a_proj_with_mqa"] = (c["kv_lora_rank"] + rope, hidden)
        found[f"{attention}.kv_b_proj"] = (heads * (nope + value), c["kv_lora_rank"])
        found[f"{attention}.o_proj"] = (hidden, heads * value)
        dense = layer < c["first_k_dense_replace"]
        experts = [f"{mlp}.experts.{e}" for e in range(c["n_routed_experts"])]
        parts = [mlp] if dense else [f"{mlp}.shared_experts", *experts]
        width = c["intermediate_size"] if dense else c["moe_intermediate_size"]
        for part in parts:
            found |= {f"{part}.gate_proj": (width, hidden), f"{part}.up_proj": (width, hidden)}
            found[f"{part}.down_proj"] = (hidden, width)
    return found


def kept(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return every tensor that is not FP8 by its published name."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    vocabulary = (c["vocab_size"], hidden)
    found: dict[str, tuple[int, ...]] = {
        "lm_head.weight": vocabulary,
        "model.embed_tokens.weight": vocabulary,
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers + 1):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{name}.self_attn.kv_a_layernorm.weight": (c["kv_lora_rank"],),
        }
        if layer >= c["first_k_dense_replace"]:
            found[f"{name}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
            found[f"{name}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
    last = f"model.layers.{layers}"
    found |= {f"{last}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return found | {f"{last}.eh_proj.weight": (hidden, 2 * hidden)}


def test_everything_fits_the_limit() -> None:
    files = [f for f in HOME.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in files) <= LIMIT


def test_config_is_the_shape_that_was_trained(config: dict[str, Any]) -> None:
    assert config == NetworkShape().config(fp8=True)
    assert config["rope_scaling"]["type"] == "yarn" and config["rope_scaling"]["mscale"]
    assert config["n_group"] > config["topk_group"] and config["n_shared_experts"] == 1


def test_names_shapes_and_types(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    matrices, others = projections(config), kept(config)
    names = (
        {f"{n}.weight" for n in matrices}
        | {f"{n}.weight_scale_inv" for n in matrices}
        | set(others)
    )
    assert set(tensors) == names
    for name, shape in matrices.items():
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
        assert weight.dtype == torch.float8_e4m3fn and tuple(weight.shape) == shape
        assert scale.dtype == torch.float32 and tuple(scale.shape) == (
            shape[0] // BLOCK,
            shape[1] // BLOCK,
        )
        assert shape[0] % BLOCK == 0 and shape[1] % BLOCK == 0
    for name, shape in others.items():
        wanted = torch.float32 if name.endswith("bias") else torch.bfloat16
        assert tuple(tensors[name].shape) == shape and tensors[name].dtype == wanted


def test_fp8_blocks_use_their_range(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name in projections(config):
        weight, scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale_inv"]
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        assert torch.isfinite(weight).all() and (scale > 0).all()
        assert (
            blocks.abs().amax(dim=(1, 3)) == 448
        ).all()  # each block's largest element is E4M3's largest


def test_correction_biases_were_trained(tensors: dict[str, Any]) -> None:
    biases = [t for name, t in tensors.items() if name.endswith("e_score_correction_bias")]
    assert biases and all(bias.std() > 1e-4 for bias in biases)


def test_tokenizer(config: dict[str, Any]) -> None:
    coder = tokenizer.load(FOLDER)
    assert coder.get_vocab_size() == config["vocab_size"]
    ids = {token: coder.token_to_id(token) for token in (*tokenizer.CONTROL, "<think>")}
    assert list(ids.values()) == [
        tokenizer.BOS_ID,
        tokenizer.EOS_ID,
        tokenizer.PAD_ID,
        tokenizer.USER_ID,
        tokenizer.ASSISTANT_ID,
        tokenizer.THINK_ID,
    ]
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.BOS_ID, tokenizer.EOS_ID)
    for text in ("12 + 345 = ?", "Grüße, 世界 🚗\n\ttab", "a</think>b"):
        encoded = coder.encode(text).ids
        assert encoded[0] == tokenizer.BOS_ID and coder.decode(encoded) == text
    assert [coder.decode([i]) for i in coder.encode("907", add_special_tokens=False).ids] == [
        "9",
        "0",
        "7",
    ]


def test_chat_template_renders_what_was_trained() -> None:
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Environment().from_string(settings["chat_template"])
    special = {"bos_token": settings["bos_token"], "eos_token": settings["eos_token"]}
    first = [{"role": "user", "content": "one"}]
    more = [
        {"role": "system", "content": "S"},
        *first,
        {"role": "assistant", "content": "why</think>\n\ntwo"},
        {"role": "user", "content": "three"},
    ]
    for think in (False, True):
        for keyword in ("thinking", "enable_thinking"):
            asked = {**special, keyword: think, "add_generation_prompt": True}
            assert template.render(messages=first, **asked) == tokenizer.prompt_text(
                (), "one", think=think
            )
            assert template.render(messages=more, **asked) == tokenizer.prompt_text(
                [("one", "two")], "three", think=think, system="S"
            )
    finished = template.render(messages=more[1:3], **special)
    assert finished == f"{tokenizer.prompt_text((), 'one')}two{tokenizer.EOS}"


def test_chat_template_writes_tool_calls_and_their_outputs() -> None:
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Environment().from_string(settings["chat_template"])
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
    ]
    text = template.render(
        messages=messages, bos_token="", eos_token="<eos>", add_generation_prompt=True
    )
    assert text == (
        "<｜User｜>q<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜><eos><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>7"
        "<｜tool▁output▁end｜><｜tool▁output▁begin｜>8<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )
