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
    bias: bool = False,
) -> list[TensorSpec]:
    """Return the three matrices of a gated feed-forward module, and their biases.

    Args:
        module: path of the module; for experts it contains "{expert}" for the number.
        width: intermediate size.
        split: how ranks split the intermediate size.
        experts: number of experts.
        bias: the matrices have biases.
    """
    up = (width, model.hidden_size)
    down = (model.hidden_size, width)
    across = Split(split.dimension, split.size, split.unit, columns=True, module=split.module)
    found = [
        TensorSpec(f"{module}.{name}.weight", role, *size, layers, experts, True, cut)
        for name, size, cut in (
            ("gate_proj", up, split),
            ("up_proj", up, split),
            ("down_proj", down, across),
        )
    ]
    return [*found, *biases(found)] if bias else found


def biases(weights: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the biases of ``weights``; every rank holds the whole bias of split columns."""
    return [
        TensorSpec(
            f"{spec.module}.bias",
            WHOLE if spec.split is not None and spec.split.columns else spec.role,
            spec.rows,
            layers=spec.layers,
            experts=spec.experts,
        )
        for spec in weights
    ]


def dense_mlp(model: ModelFacts, layers: Sequence[int], *, bias: bool = False) -> list[TensorSpec]:
    """Return the feed-forward matrices of ``layers``, which have no experts.

    ``bias``: the matrices have biases.
    """
    width = dense_width(model)
    split = Split("intermediate_size", width, module=MLP)
    return gated_mlp(model, MLP, WIDTH, width, layers, split, bias=bias)


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
    inputs = [
        query_projection(model, layers, model.hidden_size),
        *_keys_and_values(model, layers),
    ]
    output = output_projection(model, layers, model.head_dim)
    return [
        *inputs,
        output,
        *biases([*(inputs if bias else ()), *([output] if out_bias else ())]),
        *(
            TensorSpec(f"{ATTENTION}.{name}_norm.weight", WHOLE, model.head_dim, layers=layers)
            for name in ("q", "k")
            if qk_norm
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
    model: ModelFacts,
    attention: Sequence[TensorSpec],
    routed: Sequence[bool] = (),
    *,
    mlp_bias: bool = False,
) -> Inventory:
    """Return the tensors and sizes of a decoder without next-token layers.

    Args:
        attention: the tensors of attention in all layers.
        routed: for each layer, whether it has routed experts in place of a dense feed-forward
            part; () for a model without experts.
        mlp_bias: the matrices of dense feed-forward parts have biases.
    """
    layers = range(model.num_layers)
    sparse = [layer for layer in layers if any(routed) and routed[layer]]
    tensors = (
        *attention,
        *dense_mlp(model, [layer for layer in layers if layer not in sparse], bias=mlp_bias),
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
