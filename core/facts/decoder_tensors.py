"""Tensors of published decoders by name, shape and role, for the inventories of families. No torch.

The names are those of checkpoints in the Hugging Face layout, or those of a ``DecoderNames``.
"""

from __future__ import annotations

from collections.abc import Sequence

from glowplug.core.facts.decoder_names import MATRICES, PUBLISHED, DecoderNames
from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.weight_classes import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    ROUTER,
    SHARED,
    TIED,
    VOCAB,
    WHOLE,
    WIDTH,
)

BLOCK = PUBLISHED.layer  #: module path of a decoder layer
ATTENTION = PUBLISHED.within(PUBLISHED.attention)
MLP = PUBLISHED.within(PUBLISHED.mlp)
ROTARY = "rotary_emb.inv_freq"  #: ending of tensors in old checkpoints; not loaded, but computed


def embeddings(model: ModelFacts, names: DecoderNames = PUBLISHED) -> list[TensorSpec]:
    """Return the tensors of embedding, head and final norm; a tied head has none of its own."""
    size = (model.vocab_size, model.hidden_size)
    split = Split("vocab_size", model.vocab_size, module=names.embedding)
    norm = TensorSpec(f"{names.norm}.weight", WHOLE, model.hidden_size)
    if is_tied(model):
        return [TensorSpec(f"{names.embedding}.weight", TIED, *size, split=split), norm]
    both = (names.embedding, names.head)
    return [*(TensorSpec(f"{name}.weight", VOCAB, *size, split=split) for name in both), norm]


def is_tied(model: ModelFacts) -> bool:
    """Return whether the model's head uses the weights of its embedding."""
    return bool(model.config.get("tie_word_embeddings"))


def unloaded(model: ModelFacts, names: DecoderNames = PUBLISHED) -> tuple[str, ...]:
    """Return name endings of the checkpoint's tensors that are not loaded."""
    return (ROTARY, f"{names.head}.weight") if is_tied(model) else (ROTARY,)


def norms(
    model: ModelFacts, layers: Sequence[int], names: DecoderNames = PUBLISHED
) -> list[TensorSpec]:
    """Return the tensors of the two norms of each decoder layer."""
    return [
        TensorSpec(f"{names.within(name)}.weight", WHOLE, model.hidden_size, layers=layers)
        for name in names.norms
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
    matrices: tuple[str, str, str] = MATRICES,
) -> list[TensorSpec]:
    """Return the three matrices of a gated feed-forward module, and their biases.

    Args:
        module: path of the module; for experts it contains "{expert}" for the number.
        width: intermediate size.
        split: how ranks split the intermediate size.
        experts: number of experts.
        bias: the matrices have biases.
        matrices: names of the gate, up and down projections.
    """
    gate_name, up_name, down_name = matrices
    up = (width, model.hidden_size)
    down = (model.hidden_size, width)
    across = Split(split.dimension, split.size, split.unit, columns=True, module=split.module)
    found = [
        TensorSpec(f"{module}.{name}.weight", role, *size, layers, experts, True, cut)
        for name, size, cut in (
            (gate_name, up, split),
            (up_name, up, split),
            (down_name, down, across),
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


def dense_mlp(
    model: ModelFacts,
    layers: Sequence[int],
    *,
    bias: bool = False,
    names: DecoderNames = PUBLISHED,
) -> list[TensorSpec]:
    """Return the feed-forward matrices of ``layers``, which have no experts.

    ``bias``: the matrices have biases.
    """
    width = dense_width(model)
    module = names.within(names.mlp)
    split = Split("intermediate_size", width, module=module)
    matrices = names.matrices
    return gated_mlp(model, module, WIDTH, width, layers, split, bias=bias, matrices=matrices)


def dense_width(model: ModelFacts) -> int:
    """Return the intermediate size of a dense feed-forward layer."""
    return stated(model, "intermediate_size", 4 * model.hidden_size)


def output_projection(
    model: ModelFacts, layers: Sequence[int], value: int, names: DecoderNames = PUBLISHED
) -> TensorSpec:
    """Return the weight of attention's output projection.

    Args:
        value: number of value channels of a head.
    """
    size = (model.hidden_size, model.num_heads * value)
    split = Split("num_attention_heads", model.num_heads, value, columns=True)
    name = names.within(names.attention, names.projections[3])
    return TensorSpec(f"{name}.weight", HEADS, *size, layers, quantized=True, split=split)


def query_projection(
    model: ModelFacts,
    layers: Sequence[int],
    inputs: int,
    name: str = "",
    names: DecoderNames = PUBLISHED,
) -> TensorSpec:
    """Return the weight of the projection to the queries of all heads.

    Args:
        inputs: number of input channels.
        name: last part of the module's path; "" for the projection to queries of ``names``.
    """
    split = Split("num_attention_heads", model.num_heads, model.head_dim)
    size = (model.num_heads * model.head_dim, inputs)
    module = names.within(names.attention, name or names.projections[0])
    return TensorSpec(f"{module}.weight", HEADS, *size, layers, quantized=True, split=split)


def grouped_attention(
    model: ModelFacts,
    layers: Sequence[int],
    *,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    names: DecoderNames = PUBLISHED,
) -> list[TensorSpec]:
    """Return the tensors of multi-head or grouped-query attention (``MhaAttention``).

    Args:
        bias: the projections to queries, keys and values have biases.
        out_bias: the output projection has a bias.
        qk_norm: there are norms of each head's query and key.
    """
    inputs = [
        query_projection(model, layers, model.hidden_size, names=names),
        *_keys_and_values(model, layers, names),
    ]
    output = output_projection(model, layers, model.head_dim, names)
    vectors = [f"{names.within(names.attention, norm)}.weight" for norm in names.qk_norms]
    return [
        *inputs,
        output,
        *biases([*(inputs if bias else ()), *([output] if out_bias else ())]),
        *(
            TensorSpec(name, WHOLE, model.head_dim, layers=layers)
            for name in (vectors if qk_norm else ())
        ),
    ]


def _keys_and_values(
    model: ModelFacts, layers: Sequence[int], names: DecoderNames
) -> list[TensorSpec]:
    """Return the weights of the projections to keys and values."""
    size = (model.num_kv_heads * model.head_dim, model.hidden_size)
    modules = [names.within(names.attention, name) for name in names.projections[1:3]]
    split = Split("num_key_value_heads", model.num_kv_heads, model.head_dim, module=modules[0])
    return [
        TensorSpec(f"{module}.weight", KV_HEADS, *size, layers, 1, True, split)
        for module in modules
    ]


def routed_experts(
    model: ModelFacts, layers: Sequence[int], names: DecoderNames = PUBLISHED
) -> list[TensorSpec]:
    """Return the tensors of router and routed experts in ``layers``."""
    width = stated(model, "moe_intermediate_size")
    count = model.n_routed_experts
    module = names.within(names.moe, names.experts)
    router = names.within(names.moe, names.router)
    split = Split("moe_intermediate_size", width, module=module)
    experts = f"{module}.{{expert}}"
    matrices = names.expert_matrices
    return [
        TensorSpec(f"{router}.weight", ROUTER, count, model.hidden_size, layers),
        *gated_mlp(model, experts, EXPERTS, width, layers, split, count, matrices=matrices),
    ]


def shared_expert(
    model: ModelFacts, layers: Sequence[int], count: int, names: DecoderNames = PUBLISHED
) -> list[TensorSpec]:
    """Return the tensors of the shared expert in ``layers``, as wide as ``count`` routed ones."""
    width = count * stated(model, "moe_intermediate_size")
    module = names.within(names.moe, names.shared)
    split = Split("n_shared_experts x moe_intermediate_size", width, module=module)
    matrices = names.expert_matrices
    return gated_mlp(model, module, SHARED, width, layers, split, matrices=matrices)


def decoder_inventory(
    model: ModelFacts,
    attention: Sequence[TensorSpec],
    routed: Sequence[bool] = (),
    *,
    mlp_bias: bool = False,
    shared_experts: int = 0,
    names: DecoderNames = PUBLISHED,
) -> Inventory:
    """Return the tensors and sizes of a decoder without next-token layers.

    Args:
        attention: the tensors of attention in all layers.
        routed: for each layer, whether it has routed experts in place of a dense feed-forward
            part; () for a model without experts.
        mlp_bias: the matrices of dense feed-forward parts have biases.
        shared_experts: size of the shared expert of layers with routed ones, in routed experts; 0:
            there is none.
        names: names of the modules; ``attention`` has the same ones.
    """
    layers = range(model.num_layers)
    sparse = [layer for layer in layers if any(routed) and routed[layer]]
    dense = [layer for layer in layers if layer not in sparse]
    tensors = (
        *attention,
        *dense_mlp(model, dense, bias=mlp_bias, names=names),
        *(routed_experts(model, sparse, names) if sparse else ()),
        *(shared_expert(model, sparse, shared_experts, names) if shared_experts else ()),
        *norms(model, layers, names),
        *embeddings(model, names),
    )
    sizes = LayerSizes(width=dense_width(model))
    if sparse:
        sizes = LayerSizes(
            width=dense_width(model),
            expert_width=stated(model, "moe_intermediate_size"),
            experts_per_token=stated(model, "num_experts_per_tok"),
            shared_experts=shared_experts,
            routed=tuple(routed),
        )
    return Inventory(tensors, sizes, unloaded(model, names))
