"""A small Llama with random tensors, and its logits by plain formulas in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.testing.harness.plans import bare_plan

HEADS, KV_HEADS, SIZE, HIDDEN, INTER, VOCAB, LAYERS = 4, 2, 8, 32, 48, 60, 2
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def llama_facts() -> ModelFacts:
    """Return the model's facts."""
    return replace(
        bare_plan().facts.model,
        architecture="LlamaForCausalLM",
        kind="mha",
        config=LLAMA,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        max_positions=128,
    )


def llama_tensors() -> dict[str, Tensor]:
    """Return random tensors by checkpoint name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        shapes |= {
            f"{path}.input_layernorm.weight": (HIDDEN,),
            f"{path}.post_attention_layernorm.weight": (HIDDEN,),
            f"{path}.self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
            f"{path}.self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
            f"{path}.self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
            f"{path}.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
            f"{path}.mlp.gate_proj.weight": (INTER, HIDDEN),
            f"{path}.mlp.up_proj.weight": (INTER, HIDDEN),
            f"{path}.mlp.down_proj.weight": (HIDDEN, INTER),
        }
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }


def plain_llama(tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
    """Return the logits after each token, [T, V]."""
    weights = {name: value.double() for name, value in tensors.items()}
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        own = {
            name.removeprefix(f"{path}."): value
            for name, value in weights.items()
            if name.startswith(f"{path}.")
        }
        x = x + _attention(_norm(x, own["input_layernorm.weight"]), own)
        h = _norm(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ own["mlp.gate_proj.weight"].t())
        x = x + (gate * (h @ own["mlp.up_proj.weight"].t())) @ own["mlp.down_proj.weight"].t()
    return _norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].t()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + LLAMA["rms_norm_eps"]).sqrt() * weight


def _attention(h: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    tokens = len(h)
    q, k, v = (
        (h @ own[f"self_attn.{name}_proj.weight"].t()).view(tokens, -1, SIZE) for name in "qkv"
    )
    q, k = _rotated(q), _rotated(k)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    scores = torch.einsum("thd,mhd->htm", q, k) * SIZE**-0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = torch.einsum("htm,mhd->thd", probs, v).reshape(tokens, -1)
    return mixed @ own["self_attn.o_proj.weight"].t()


def _rotated(x: Tensor) -> Tensor:
    half = SIZE // 2
    speeds = LLAMA["rope_theta"] ** (-torch.arange(half).double() / half)
    angles = (torch.arange(len(x)).double()[:, None] * speeds)[:, None]
    first, second = x.split(half, dim=-1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )
