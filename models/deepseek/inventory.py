"""The tensors of DeepSeek models: latent attention, experts, next-token layers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glowplug.core.facts.decoder_tensors import (
    ATTENTION,
    BLOCK,
    MLP,
    biases,
    dense_mlp,
    dense_width,
    embeddings,
    norms,
    output_projection,
    query_projection,
    routed_experts,
    shared_expert,
    unloaded,
)
from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.weight_classes import KV_UP, ROUTER, VOCAB, WHOLE
from glowplug.models.deepseek.config import BIAS_METHOD, default_method, is_dense, topk_method


def normalise(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with defaults for ``topk_method`` and ``scoring_func`` if missing.

    transformers drops both keys for V3 when it saves a model.
    """
    usual = default_method(config["architectures"][0], config)
    defaults = {
        "topk_method": usual,
        "scoring_func": "sigmoid" if usual == BIAS_METHOD else "softmax",
    }
    return config | {key: value for key, value in defaults.items() if config.get(key) is None}


def deepseek_inventory(model: ModelFacts) -> Inventory:
    """Return the tensors and layer sizes of a DeepSeek model, including its NextN layers."""
    target = model.num_layers
    layers = range(target + model.nextn_layers)
    routed = tuple(not is_dense(model, layer) for layer in layers)
    dense = [layer for layer in layers if not routed[layer]]
    experts = [layer for layer in layers if routed[layer]]
    return Inventory(
        (
            *_attention(model, layers),
            *dense_mlp(model, dense, bias=bool(model.config.get("mlp_bias"))),
            *(_experts(model, experts) if experts else ()),
            *norms(model, layers),
            *_nextn(model, layers[target:]),
            *embeddings(model),
        ),
        LayerSizes(
            value=stated(model, "v_head_dim"),
            query_rank=stated(model, "q_lora_rank"),
            width=dense_width(model),
            expert_width=stated(model, "moe_intermediate_size"),
            experts_per_token=stated(model, "num_experts_per_tok"),
            shared_experts=stated(model, "n_shared_experts"),
            routed=routed,
        ),
        unloaded(model),
    )


def _attention(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the projections and norms of latent attention in ``layers``.

    ``attention_bias`` of config.json stands for biases of the projections to latents and of the
    output projection.
    """
    value = stated(model, "v_head_dim") or model.head_dim
    up = model.head_dim - model.qk_rope_head_dim + value
    rank = model.kv_lora_rank
    down = _down(model, layers, "kv_a_proj_with_mqa", rank + model.qk_rope_head_dim)
    output = output_projection(model, layers, value)
    return [
        *_queries(model, layers),
        down,
        *(biases([down, output]) if model.config.get("attention_bias") else ()),
        TensorSpec(f"{ATTENTION}.kv_a_layernorm.weight", WHOLE, rank, layers=layers),
        TensorSpec(
            f"{ATTENTION}.kv_b_proj.weight",
            KV_UP,
            model.num_heads * up,
            rank,
            layers,
            quantized=True,
            split=Split("num_attention_heads", model.num_heads, up),
        ),
        output,
    ]


def _queries(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the tensors that project hidden states to queries, directly or through a latent."""
    rank = stated(model, "q_lora_rank")
    if not rank:
        return [query_projection(model, layers, model.hidden_size)]
    down = _down(model, layers, "q_a_proj", rank)
    return [
        down,
        *(biases([down]) if model.config.get("attention_bias") else ()),
        TensorSpec(f"{ATTENTION}.q_a_layernorm.weight", WHOLE, rank, layers=layers),
        query_projection(model, layers, rank, "q_b_proj"),
    ]


def _down(model: ModelFacts, layers: Sequence[int], name: str, rows: int) -> TensorSpec:
    """Return the weight of the projection ``name`` from hidden states to ``rows`` channels."""
    size = (rows, model.hidden_size)
    return TensorSpec(f"{ATTENTION}.{name}.weight", WHOLE, *size, layers, quantized=True)


def _experts(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the tensors of gate, routed experts and shared expert in ``layers``."""
    found = routed_experts(model, layers)
    if topk_method(model) == BIAS_METHOD:
        bias = f"{MLP}.gate.e_score_correction_bias"
        found.append(TensorSpec(bias, ROUTER, model.n_routed_experts, layers=layers))
    shared = stated(model, "n_shared_experts")
    return [*found, *(shared_expert(model, layers, shared) if shared else ())]


def _nextn(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the tensors that NextN layers have in addition to those of a decoder layer.

    A layer's own embedding and head are optional: without them the layer uses the target's.
    """
    hidden = model.hidden_size
    vocab = (model.vocab_size, hidden)
    return [
        *(
            TensorSpec(f"{BLOCK}.{name}.weight", WHOLE, hidden, layers=layers)
            for name in ("enorm", "hnorm", "shared_head.norm")
        ),
        TensorSpec(f"{BLOCK}.eh_proj.weight", WHOLE, hidden, 2 * hidden, layers),
        *(
            TensorSpec(f"{BLOCK}.{name}.weight", VOCAB, *vocab, layers, optional=True)
            for name in ("embed_tokens", "shared_head.head")
        ),
    ]
