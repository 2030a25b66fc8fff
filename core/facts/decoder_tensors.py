"""Tensors of published decoders by name, shape and role, for the inventories of families. No torch.

The names are those of checkpoints in the Hugging Face layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.weight_classes import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    ROUTER,
    TIED,
    VOCAB,
    WHOLE,
    WIDTH,
)

BLOCK = "model.layers.{layer}"  #: module path of a decoder layer
ATTENTION = f"{BLOCK}.self_attn"
MLP = f"{BLOCK}.mlp"
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
ROTARY = "rotary_emb.inv_freq"  #: ending of tensors in old checkpoints; not loaded, but computed


def embeddings(model: ModelFacts) -> list[TensorSpec]:
    """Return the tensors of embedding, head and final norm; a tied head has none of its own."""
    size = (model.vocab_size, model.hidden_size)
    split = Split("vocab_size", model.vocab_size, module=EMBEDDING)
    norm = TensorSpec("model.norm.weight", WHOLE, model.hidden_size)
    if is_tied(model):
        return [TensorSpec(f"{EMBEDDING}.weight", TIED, *size, split=split), norm]
    both = (EMBEDDING, HEAD)
    return [*(TensorSpec(f"{name}.weight", VOCAB, *size, split=split) for name in both), norm]


def is_tied(model: ModelFacts) -> bool:
    """Return whether the model's head uses the weights of its embedding."""
    return bool(model.config.get("tie_word_embeddings"))


def unloaded(model: ModelFacts) -> tuple[str, ...]:
    """Return name endings of the checkpoint's tensors that are not loaded."""
    return (ROTARY, f"{HEAD}.weight") if is_tied(model) else (ROTARY,)


def norms(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the tensors of the two norms of each decoder layer."""
    return [
        TensorSpec(f"{BLOCK}.{name}.weight", WHOLE, model.hidden_size, layers=layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]


def gated_mlp(
    model: ModelFacts,
    module: str,
    role: str,
    width: int,
    layers: Sequence[int],
    split: Split,
    experts: int = 1,
) -> list[TensorSpec]:
    """Return the three matrices of a gated feed-forward module.

    Args:
        module: path of the module; for experts it contains "{expert}" for the number.
        width: intermediate size.
        split: how ranks split the intermediate size.
        experts: number of experts.
    """
    up = (width, model.hidden_size)
    down = (model.hidden_size, width)
    across = Split(split.dimension, split.size, split.unit, columns=True, module=split.module)
    return [
        TensorSpec(f"{module}.{name}.weight", role, *size, layers, experts, True, cut)
        for name, size, cut in (
            ("gate_proj", up, split),
            ("up_proj", up, split),
            ("down_proj", down, across),
        )
    ]


def dense_mlp(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the feed-forward matrices of ``layers``, which have no experts."""
    width = dense_width(model)
    split = Split("intermediate_size", width, module=MLP)
    return gated_mlp(model, MLP, WIDTH, width, layers, split)


def dense_width(model: ModelFacts) -> int:
    """Return the intermediate size of a dense feed-forward layer."""
    return stated(model, "intermediate_size", 4 * model.hidden_size)


def output_projection(model: ModelFacts, layers: Sequence[int], value: int) -> TensorSpec:
    """Return the weight of attention's output projection.

    Args:
        value: number of value channels of a head.
    """
    size = (model.hidden_size, model.num_heads * value)
    split = Split("num_attention_heads", model.num_heads, value, columns=True)
    return TensorSpec(
        f"{ATTENTION}.o_proj.weight", HEADS, *size, layers, quantized=True, split=split
    )


def query_projection(
    model: ModelFacts, layers: Sequence[int], inputs: int, name: str = "q_proj"
) -> TensorSpec:
    """Return the weight of the projection to the queries of all heads.

    Args:
        inputs: number of input channels.
        name: last part of the module's path.
    """
    split = Split("num_attention_heads", model.num_heads, model.head_dim)
    size = (model.num_heads * model.head_dim, inputs)
    return TensorSpec(
        f"{ATTENTION}.{name}.weight", HEADS, *size, layers, quantized=True, split=split
    )


def grouped_attention(
    model: ModelFacts,
    layers: Sequence[int],
    *,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> list[TensorSpec]:
    """Return the tensors of multi-head or grouped-query attention (``MhaAttention``).

    Args:
        bias: the projections to queries, keys and values have biases.
        out_bias: the output projection has a bias.
        qk_norm: there are norms of each head's query and key.
    """
    vectors: list[tuple[str, str, int]] = []
    keys = model.num_kv_heads * model.head_dim
    if bias:
        vectors.append(("q_proj.bias", HEADS, model.num_heads * model.head_dim))
        vectors += [(f"{name}_proj.bias", KV_HEADS, keys) for name in ("k", "v")]
    if out_bias:
        vectors.append(("o_proj.bias", WHOLE, model.hidden_size))
    if qk_norm:
        vectors += [(f"{name}_norm.weight", WHOLE, model.head_dim) for name in ("q", "k")]
    return [
        query_projection(model, layers, model.hidden_size),
        *_keys_and_values(model, layers),
        output_projection(model, layers, model.head_dim),
        *(
            TensorSpec(f"{ATTENTION}.{name}", role, size, layers=layers)
            for name, role, size in vectors
        ),
    ]


def _keys_and_values(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the weights of the projections to keys and values."""
    size = (model.num_kv_heads * model.head_dim, model.hidden_size)
    split = Split(
        "num_key_value_heads", model.num_kv_heads, model.head_dim, module=f"{ATTENTION}.k_proj"
    )
    return [
        TensorSpec(f"{ATTENTION}.{name}.weight", KV_HEADS, *size, layers, 1, True, split)
        for name in ("k_proj", "v_proj")
    ]


def routed_experts(model: ModelFacts, layers: Sequence[int]) -> list[TensorSpec]:
    """Return the tensors of gate and routed experts in ``layers``."""
    width = stated(model, "moe_intermediate_size")
    count = model.n_routed_experts
    split = Split("moe_intermediate_size", width, module=f"{MLP}.experts")
    experts = f"{MLP}.experts.{{expert}}"
    return [
        TensorSpec(f"{MLP}.gate.weight", ROUTER, count, model.hidden_size, layers),
        *gated_mlp(model, experts, EXPERTS, width, layers, split, count),
    ]


def decoder_inventory(
    model: ModelFacts, attention: Sequence[TensorSpec], routed: Sequence[bool] = ()
) -> Inventory:
    """Return the tensors and sizes of a decoder without next-token layers.

    Args:
        attention: the tensors of attention in all layers.
        routed: for each layer, whether it has routed experts in place of a dense feed-forward
            part; () for a model without experts.
    """
    layers = range(model.num_layers)
    sparse = [layer for layer in layers if any(routed) and routed[layer]]
    tensors = (
        *attention,
        *dense_mlp(model, [layer for layer in layers if layer not in sparse]),
        *(routed_experts(model, sparse) if sparse else ()),
        *norms(model, layers),
        *embeddings(model),
    )
    sizes = LayerSizes(width=dense_width(model))
    if sparse:
        sizes = LayerSizes(
            width=dense_width(model),
            expert_width=stated(model, "moe_intermediate_size"),
            experts_per_token=stated(model, "num_experts_per_tok"),
            routed=tuple(routed),
        )
    return Inventory(tensors, sizes, unloaded(model))
