"""Tensors of published decoders by name, shape and role, and Llama's inventory. No torch.

The names are those of checkpoints in the Hugging Face layout, which DeepSeek and Llama share except
for attention and experts (``models/deepseek/inventory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.weight_classes import HEADS, KV_HEADS, TIED, VOCAB, WHOLE, WIDTH

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


def llama_inventory(model: ModelFacts) -> Inventory:
    """Return the tensors of a Llama model: grouped-query attention, gated feed-forward layers."""
    layers = range(model.num_layers)
    size = (model.num_kv_heads * model.head_dim, model.hidden_size)
    split = Split(
        "num_key_value_heads", model.num_kv_heads, model.head_dim, module=f"{ATTENTION}.k_proj"
    )
    keys_and_values = [
        TensorSpec(f"{ATTENTION}.{name}.weight", KV_HEADS, *size, layers, 1, True, split)
        for name in ("k_proj", "v_proj")
    ]
    return Inventory(
        (
            query_projection(model, layers, model.hidden_size),
            *keys_and_values,
            output_projection(model, layers, model.head_dim),
            *dense_mlp(model, layers),
            *norms(model, layers),
            *embeddings(model),
        ),
        LayerSizes(width=dense_width(model)),
        unloaded(model),
    )
