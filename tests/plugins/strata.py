"""A third party's model family, quantization scheme and attention backend, declared for plans only.

Nothing of them is like the built-in ones: the keys of config.json, the names of tensors, the packed
format of quantised weights and the entries of the KV cache are their own.
"""

from __future__ import annotations

from typing import Any, Literal

from glowplug.core.api import (
    AttentionOffers,
    AttentionOptions,
    Component,
    Inventory,
    KVContext,
    KVEntry,
    LayerSizes,
    ModelFacts,
    ModelOffers,
    Options,
    QuantizationOffers,
    QuantizationOptions,
    Split,
    StoredLeaf,
    StoredWeight,
    TensorFact,
    TensorSpec,
    hookimpl,
    weight_classes as roles,
)

BLOCK = "strata.{layer}"
GROUP = 16  #: inputs that share a step
#: keys of this family -> keys of published checkpoints
KEYS = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "readers": "num_attention_heads",
    "memories": "num_key_value_heads",
    "words": "vocab_size",
    "reach": "max_position_embeddings",
    "banks": "n_routed_experts",
    "glimpses": "num_nextn_predict_layers",
}


class StrataOptions(Options):
    use: str = "auto"


class QuadsOptions(QuantizationOptions):
    use: Literal["quads"] = "quads"


class SteppedOptions(AttentionOptions):
    use: Literal["stepped"] = "stepped"


def normalise(config: dict[str, Any]) -> dict[str, Any]:
    return config | {KEYS[key]: value for key, value in config.items() if key in KEYS}


def inventory(model: ModelFacts) -> Inventory:
    hidden, heads, dim = model.hidden_size, model.num_heads, model.head_dim
    inner, banks = model.config["inner"], model.n_routed_experts
    layers = range(model.num_layers + model.nextn_layers)
    dense, mixed = layers[:1], layers[1:]
    readers = Split("readers", heads, dim)
    memories = Split("memories", model.num_kv_heads, dim, module=f"{BLOCK}.recall")
    out = Split("readers", heads, dim, columns=True)
    banked = Split("inner", inner, module=f"{BLOCK}.banks")

    def matrix(name: str, role: str, rows: int, columns: int, where: Any, **more: Any) -> Any:
        return TensorSpec(f"{BLOCK}.{name}", role, rows, columns, where, quantized=True, **more)

    kept = model.num_kv_heads * dim
    words = Split("words", model.vocab_size)
    return Inventory(
        (
            matrix("read.kernel", roles.HEADS, heads * dim, hidden, layers, split=readers),
            matrix("recall.kernel", roles.KV_HEADS, kept, hidden, layers, split=memories),
            matrix("store.kernel", roles.KV_HEADS, kept, hidden, layers, split=memories),
            matrix("speak.kernel", roles.HEADS, hidden, heads * dim, layers, split=out),
            TensorSpec(f"{BLOCK}.speak.bias", roles.WHOLE, hidden, layers=layers),
            TensorSpec(f"{BLOCK}.scale", roles.WHOLE, hidden, layers=layers),
            matrix("up.kernel", roles.WIDTH, inner, hidden, dense, split=Split("inner", inner)),
            TensorSpec(f"{BLOCK}.sorter.kernel", roles.ROUTER, banks, hidden, mixed),
            matrix(
                "banks.{expert}.up.kernel",
                roles.EXPERTS,
                inner,
                hidden,
                mixed,
                experts=banks,
                split=banked,
            ),
            TensorSpec(
                f"{BLOCK}.glue.kernel", roles.WHOLE, hidden, 2 * hidden, layers[model.num_layers :]
            ),
            TensorSpec("table", roles.VOCAB, model.vocab_size, hidden, split=words),
            TensorSpec("answers.kernel", roles.VOCAB, model.vocab_size, hidden),
        ),
        LayerSizes(
            width=inner,
            expert_width=inner,
            experts_per_token=2,
            routed=tuple(layer in mixed for layer in layers),
        ),
        unloaded=(".history",),
    )


def stored_quads(weight: StoredWeight) -> dict[str, TensorFact]:
    """Return four codes of two bits in a byte, and a step for each group of inputs."""
    return {
        "codes": TensorFact("uint8", (weight.rows, weight.columns // 4)),
        "steps": TensorFact("float16", (weight.rows, weight.columns // GROUP)),
    }


def stepped_entries(context: KVContext) -> tuple[KVEntry, ...]:
    return (
        KVEntry("pairs", (context.heads, 2, context.model.head_dim), "int8"),
        KVEntry("steps", (context.heads, 2), "float16"),
    )


@hookimpl
def register_models() -> list[Component]:
    offers = ModelOffers(
        architectures=frozenset({"StrataForCausalLM"}),
        kind="mha",
        nextn=True,
        inventory=inventory,
        normalise=normalise,
        layer_prefix="strata.",
    )
    return [Component("strata", StrataOptions, "nowhere:Nothing", offers, summary="strata")]


@hookimpl
def register_quantization_schemes() -> list[Component]:
    offers = QuantizationOffers(
        reads=frozenset({"quads"}),
        stored=stored_quads,
        leaves=(
            StoredLeaf("codes", 0.25, dtype="uint8", packed=4),
            StoredLeaf("steps", 2, scale=True),
        ),
    )
    return [Component("quads", QuadsOptions, "nowhere:Nothing", offers, summary="two-bit weights")]


@hookimpl
def register_attention_backends() -> list[Component]:
    offers = AttentionOffers(kinds=frozenset({"mha"}), kv_entries=stepped_entries)
    return [Component("stepped", SteppedOptions, "nowhere:Nothing", offers, summary="int8 cache")]
