"""The built-in model families: their architectures, and checks of a model's config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from glowplug.core.errors import Refusal
from glowplug.core.facts.decoder_tensors import decoder_inventory, grouped_attention
from glowplug.core.facts.inventory import Inventory
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plugin.component import CheckContext, Component, Options
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ModelOffers
from glowplug.models.deepseek.config import TOPK_METHODS, topk_method
from glowplug.models.deepseek.inventory import deepseek_inventory, normalise
from glowplug.models.eagle.check import check_head
from glowplug.models.eagle.config import DEEPSEEK_EAGLE3, LLAMA_EAGLE, LLAMA_EAGLE3
from glowplug.models.eagle.inventory import head_inventory

#: type of rope scaling -> keys that config.json must have for it
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DEEPSEEK_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_KEYS = ("moe_intermediate_size", "num_experts_per_tok")


class ModelOptions(Options):
    """Options of a model family: none of its own, since config.json determines everything."""

    use: str = "auto"


def _refuse(
    reason: str, fix: str = "serve a checkpoint whose config.json this family supports"
) -> Refusal:
    return Refusal("models", "model", reason, fix)


def _missing(key: str) -> Refusal:
    return _refuse(f"config.json has no {key}", "use the checkpoint's own config.json")


def check_decoder(context: CheckContext) -> Iterator[Refusal]:
    """Yield refusals of missing or unsupported values in config.json, common to all families."""
    yield from check_head(context)
    config = context.facts.model.config
    activation = config.get("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        yield _refuse(f"config.json has the activation {activation!r}; only silu is supported")
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        yield _refuse(
            f"rope_scaling is {scaling!r}, expected an object",
            "use the checkpoint's own config.json",
        )
        return
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_KEYS:
        yield _refuse(f"rope_scaling has type {kind!r}; supported: {', '.join(sorted(ROPE_KEYS))}")
    for key in ROPE_KEYS.get(kind, ()):
        if not scaling.get(key):
            yield _missing(f"rope_scaling.{key}")
    if not config.get("intermediate_size"):
        yield _missing("intermediate_size")


def check_deepseek(context: CheckContext) -> Iterable[Refusal]:
    """Yield refusals of missing or unsupported values in a DeepSeek model's config.json.

    The checks cover the sizes of latent attention, the gate's ``topk_method``, whether the number
    of groups divides that of experts, and whether a token's groups have enough experts.
    """
    yield from check_decoder(context)
    facts = context.facts.model
    config = facts.config
    experts = facts.n_routed_experts
    for key in DEEPSEEK_KEYS + (MOE_KEYS if experts else ()):
        if not config.get(key):
            yield _missing(key)
    if not experts:
        return
    method = topk_method(facts)
    if method not in TOPK_METHODS:
        yield _refuse(f"topk_method is {method!r}; supported: {', '.join(sorted(TOPK_METHODS))}")
    groups = config.get("n_group") or 1
    best = config.get("topk_group") or 1
    if experts % groups:
        yield _refuse(
            f"{experts} experts cannot be split into {groups} equal groups "
            f"(n_routed_experts, n_group)"
        )
    elif (config.get("num_experts_per_tok") or 0) > experts // groups * min(best, groups):
        yield _refuse(
            f"{config['num_experts_per_tok']} experts per token cannot come from {best} groups of "
            f"{experts // groups} (num_experts_per_tok, topk_group)"
        )


def llama_inventory(model: ModelFacts) -> Inventory:
    """Return the tensors of a Llama model: grouped-query attention, gated feed-forward layers.

    ``attention_bias`` of config.json stands for biases of all four projections.
    """
    biased = bool(model.config.get("attention_bias"))
    layers = range(model.num_layers)
    attention = grouped_attention(model, layers, bias=biased, out_bias=biased)
    return decoder_inventory(model, attention, mlp_bias=bool(model.config.get("mlp_bias")))


@hookimpl
def register_models() -> list[Component]:
    deepseek = "glowplug.models.deepseek.model:DeepseekFamily"
    return [
        Component(
            "deepseek_v2",
            ModelOptions,
            deepseek,
            check=check_deepseek,
            offers=ModelOffers(
                architectures=frozenset({"DeepseekV2ForCausalLM"}),
                eagle_architectures=DEEPSEEK_EAGLE3,
                features=True,
                kind="mla",
                sampled_last_layer=True,
                inventory=deepseek_inventory,
                eagle_inventory=head_inventory,
                normalise=normalise,
            ),
            summary="DeepSeek-V2, V2-Lite, Coder-V2: latent attention, softmax gate",
        ),
        Component(
            "deepseek_v3",
            ModelOptions,
            deepseek,
            check=check_deepseek,
            offers=ModelOffers(
                architectures=frozenset({"DeepseekV3ForCausalLM"}),
                eagle_architectures=DEEPSEEK_EAGLE3,
                features=True,
                kind="mla",
                nextn=True,
                draft_architectures=frozenset({"DeepseekV3ForCausalLMNextN"}),
                sampled_last_layer=True,
                inventory=deepseek_inventory,
                eagle_inventory=head_inventory,
                normalise=normalise,
            ),
            summary="DeepSeek-V3 and R1: latent attention, sigmoid gate with correction bias, "
            "NextN layer",
        ),
        Component(
            "llama",
            ModelOptions,
            "glowplug.models.llama:LlamaFamily",
            check=check_decoder,
            offers=ModelOffers(
                architectures=frozenset({"LlamaForCausalLM"}),
                eagle_architectures=LLAMA_EAGLE | LLAMA_EAGLE3,
                features=True,
                kind="mha",
                inventory=llama_inventory,
                eagle_inventory=head_inventory,
            ),
            summary="Llama: grouped-query attention, gated feed-forward",
        ),
    ]
