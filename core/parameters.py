"""How many parameters a config.json describes, for plans made without tensor headers. No torch.

Reads published keys only (MLA, MoE, GQA); the count leaves out norms and biases, well under one percent.
"""
from __future__ import annotations

from glowplug.core.facts import ModelFacts


def count_parameters(model: ModelFacts) -> int:
    """Parameters of the model without next-token layers."""
    embedding = model.vocab_size * model.hidden_size
    tied = bool(model.config.get("tie_word_embeddings"))
    total = embedding * (1 if tied else 2)
    for layer in range(model.num_layers):
        total += _attention(model) + (_experts(model) if is_moe_layer(model, layer) else _mlp(model))
    return total


def is_moe_layer(model: ModelFacts, layer: int) -> bool:
    """Does layer number ``layer`` route to experts?"""
    if not model.n_routed_experts:
        return False
    return layer >= _int(model, "first_k_dense_replace") and layer % max(1, _int(model, "moe_layer_freq", 1)) == 0


def _int(model: ModelFacts, key: str, default: int = 0) -> int:
    value = model.config.get(key)
    return value if isinstance(value, int) else default


def _attention(model: ModelFacts) -> int:
    hidden, heads = model.hidden_size, model.num_heads
    if model.kind == "mha":
        return 2 * hidden * heads * model.head_dim + 2 * hidden * model.num_kv_heads * model.head_dim
    q_rank, v_dim = _int(model, "q_lora_rank"), _int(model, "v_head_dim", model.head_dim)
    nope = model.head_dim - model.qk_rope_head_dim
    queries = hidden * q_rank + q_rank * heads * model.head_dim if q_rank else hidden * heads * model.head_dim
    latent = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    return queries + latent + model.kv_lora_rank * heads * (nope + v_dim) + heads * v_dim * hidden


def _mlp(model: ModelFacts) -> int:
    return 3 * model.hidden_size * _int(model, "intermediate_size", 4 * model.hidden_size)


def _experts(model: ModelFacts) -> int:
    width = _int(model, "moe_intermediate_size", _int(model, "intermediate_size"))
    experts = model.n_routed_experts + _int(model, "n_shared_experts")
    return 3 * model.hidden_size * width * experts + model.hidden_size * model.n_routed_experts
