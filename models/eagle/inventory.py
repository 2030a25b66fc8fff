"""The tensors of EAGLE heads. No torch."""

from __future__ import annotations

from glowplug.core.facts.decoder_tensors import ROTARY, biases, dense_width, gated_mlp
from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.weight_classes import HEADS, KV_HEADS, KV_UP, VOCAB, WHOLE, WIDTH
from glowplug.models.eagle.config import OFFSETS, TARGET_MASK, EagleConfig


def head_inventory(model: ModelFacts) -> Inventory:
    """Return the tensors of a head with attention of either kind."""
    config = EagleConfig.read(model)
    hidden = model.hidden_size
    module = f"{config.layer}.self_attn"
    inputs = 2 * hidden if config.version == 3 else hidden
    width = dense_width(model)
    mlp = f"{config.layer}.mlp"
    latent = model.kind == "mla"
    attention = (_latent if latent else _grouped)(model, module, inputs)
    split = Split("intermediate_size", width, module=mlp)
    mlp_bias = bool(model.config.get("mlp_bias"))
    return Inventory(
        (
            *attention,
            *(biases(_biased(attention, latent)) if model.config.get("attention_bias") else ()),
            *gated_mlp(model, mlp, WIDTH, width, (), split, bias=mlp_bias),
            *_outer(model, config),
        ),
        LayerSizes(
            value=stated(model, "v_head_dim"),
            query_rank=stated(model, "q_lora_rank"),
            width=width,
            features=config.feature_count,
        ),
        (ROTARY, OFFSETS, TARGET_MASK, *(() if config.own_head else ("lm_head.weight",))),
    )


def _biased(attention: list[TensorSpec], latent: bool) -> list[TensorSpec]:
    """Return the projections that have biases with ``attention_bias`` of config.json.

    In latent attention they are those to latents, which every rank holds, and the output
    projection, whose columns are split.
    """
    return [
        spec
        for spec in attention
        if spec.columns and (not latent or spec.split is None or spec.split.columns)
    ]


def _outer(model: ModelFacts, config: EagleConfig) -> list[TensorSpec]:
    """Return the norms, ``fc``, embedding and head of a head."""
    hidden = model.hidden_size
    norms = [f"{config.layer}.post_attention_layernorm"]
    inputs = 2 * hidden
    if config.version == 3:
        norms += [f"{config.layer}.input_layernorm", f"{config.layer}.hidden_norm"]
        norms.append(f"{config.root}norm")
        inputs = hidden * config.feature_count
    found = [TensorSpec(f"{name}.weight", WHOLE, hidden) for name in norms]
    if inputs:
        found.append(TensorSpec(f"{config.root}fc.weight", WHOLE, hidden, inputs))
    for name, own, rows in (
        (f"{config.root}embed_tokens", config.own_embedding, model.vocab_size),
        ("lm_head", config.own_head, config.draft_vocab),
    ):
        if own:
            split = Split("vocab_size", rows, module=name)
            found.append(TensorSpec(f"{name}.weight", VOCAB, rows, hidden, split=split))
    return found


def _grouped(model: ModelFacts, module: str, inputs: int) -> list[TensorSpec]:
    """Return the projections of grouped-query attention."""
    heads = model.num_heads
    size = model.head_dim
    keys = model.num_kv_heads
    split = Split("num_key_value_heads", keys, size, module=f"{module}.k_proj")
    return [
        TensorSpec(
            f"{module}.q_proj.weight",
            HEADS,
            heads * size,
            inputs,
            split=Split("num_attention_heads", heads, size),
        ),
        *(
            TensorSpec(f"{module}.{name}.weight", KV_HEADS, keys * size, inputs, split=split)
            for name in ("k_proj", "v_proj")
        ),
        _output(model, module, size),
    ]


def _latent(model: ModelFacts, module: str, inputs: int) -> list[TensorSpec]:
    """Return the projections and norms of latent attention."""
    heads = model.num_heads
    size = model.head_dim
    value = stated(model, "v_head_dim") or size
    up = size - model.qk_rope_head_dim + value
    rank = model.kv_lora_rank
    queries = stated(model, "q_lora_rank")
    query = Split("num_attention_heads", heads, size)
    found = [
        TensorSpec(
            f"{module}.kv_a_proj_with_mqa.weight", WHOLE, rank + model.qk_rope_head_dim, inputs
        ),
        TensorSpec(f"{module}.kv_a_layernorm.weight", WHOLE, rank),
        TensorSpec(
            f"{module}.kv_b_proj.weight",
            KV_UP,
            heads * up,
            rank,
            split=Split("num_attention_heads", heads, up),
        ),
        _output(model, module, value),
    ]
    if not queries:
        return [
            *found,
            TensorSpec(f"{module}.q_proj.weight", HEADS, heads * size, inputs, split=query),
        ]
    return [
        *found,
        TensorSpec(f"{module}.q_a_proj.weight", WHOLE, queries, inputs),
        TensorSpec(f"{module}.q_a_layernorm.weight", WHOLE, queries),
        TensorSpec(f"{module}.q_b_proj.weight", HEADS, heads * size, queries, split=query),
    ]


def _output(model: ModelFacts, module: str, value: int) -> TensorSpec:
    """Return the output projection of heads with ``value`` channels each."""
    split = Split("num_attention_heads", model.num_heads, value, columns=True)
    size = (model.hidden_size, model.num_heads * value)
    return TensorSpec(f"{module}.o_proj.weight", HEADS, *size, split=split)
