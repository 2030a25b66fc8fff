"""The declaration of the model family "qwen". It imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glowplug.core.api import (
    CheckContext,
    Component,
    Inventory,
    ModelFacts,
    ModelOffers,
    Options,
    Refusal,
    decoder_tensors,
    hookimpl,
)

NAMES = QWEN2, QWEN3, MOE = tuple(f"{one}ForCausalLM" for one in ("Qwen2", "Qwen3", "Qwen3Moe"))
MOE_KEYS = ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


class QwenOptions(Options):
    use: str = "auto"


def normalise(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys that family and inventory read."""
    name, bias = config["architectures"][0], bool(config.get("attention_bias"))
    experts = (config.get("num_experts") or config.get("num_local_experts")) if name == MOE else 0
    head = {"head_dim": config.get("head_dim") or 128} if name == QWEN3 else {}
    has = {"bias": name == QWEN2 or bias, "out_bias": name != QWEN2 and bias}
    return {"rms_norm_eps": 1e-6, **config, **head, "n_routed_experts": experts or 0} | {
        "attention_has": {**has, "qk_norm": name != QWEN2}
    }


def routed(model: ModelFacts) -> tuple[bool, ...]:
    """Return for each layer whether it has experts."""
    config, sparse = model.config, model.n_routed_experts > 0
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return tuple(sparse and i not in dense and not (i + 1) % step for i in range(model.num_layers))


def inventory(model: ModelFacts) -> Inventory:
    """Return the tensors and sizes of a model."""
    has = model.config["attention_has"]
    attention = decoder_tensors.grouped_attention(model, range(model.num_layers), **has)
    return decoder_tensors.decoder_inventory(model, attention, routed(model))


def check_qwen(context: CheckContext) -> Iterator[Refusal]:
    """Refuse what config.json lacks, and what the layers do not compute."""
    config, fix = context.facts.model.config, "serve a checkpoint that this family supports"
    needed = ("intermediate_size", *(MOE_KEYS if context.facts.model.architecture == MOE else ()))
    reasons = [f"config.json has no {key}" for key in needed if not config.get(key)]
    scaling, ropes = config.get("rope_scaling") or {}, ("default", "linear", "dynamic", "yarn")
    for key, value, supported in (
        ("use_sliding_window", bool(config.get("use_sliding_window")), (False,)),
        ("dual_chunk_attention_config", config.get("dual_chunk_attention_config"), (None,)),
        ("hidden_act", config.get("hidden_act", "silu"), ("silu", "swish")),
        ("rope_scaling", scaling.get("rope_type", "default"), ropes),
    ):
        if value not in supported:
            reasons.append(f"config.json has {key} {value!r}; supported: {supported}")
    yield from (Refusal("qwen", "model", reason, fix) for reason in reasons)


@hookimpl
def register_models() -> list[Component]:
    offers = ModelOffers(architectures=frozenset(NAMES), inventory=inventory, normalise=normalise)
    return [
        Component(
            name="qwen",
            options=QwenOptions,
            factory="glowplug_qwen.family:QwenFamily",
            check=check_qwen,
            offers=offers,
            contract=2,
            summary="Qwen2, Qwen3 and Qwen3-MoE: grouped-query attention, experts",
        )
    ]
