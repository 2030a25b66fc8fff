"""The part of a DeepSeek config.json from which the model is built: V2, V2-Lite, Coder-V2, V3, R1.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.core.facts.model_facts import ModelFacts, stated

#: method of a gate with sigmoid scores and a correction bias for each expert
BIAS_METHOD = "noaux_tc"
#: methods that limit a token's experts to some groups
GROUPED_METHODS = frozenset({"group_limited_greedy", BIAS_METHOD})
TOPK_METHODS = GROUPED_METHODS | {"greedy"}


@dataclass(frozen=True)
class DeepseekConfig:
    """Sizes and switches of a DeepSeek model, with short names for the keys of config.json.

    Attributes:
        nope: number of a head's key channels that have no rotary embedding.
        rope: number of a head's key channels that have rotary embedding.
        v: number of value channels of a head.
        kv_lora: rank of the latent keys and values.
        q_lora: rank of the latent queries; None: queries are projected directly.
        topk: number of routed experts per token.
        shared: number of shared experts.
        sigmoid: score experts by sigmoid with a correction bias, as V3 does; False: by softmax.
        groups: number of groups of experts; 1 if the gate is not limited to groups.
        topk_groups: number of groups that a token's experts may come from; 1 if ``groups`` is 1.
        renormalize: scale the weights of a token's experts to a sum of 1.
        scale: factor on the output of the routed experts.
        interleaved: the rotary channels are stored as interleaved pairs.
        tied: the head uses the weights of the embedding.
    """

    hidden: int
    heads: int
    nope: int
    rope: int
    v: int
    kv_lora: int
    q_lora: int | None
    eps: float
    intermediate: int
    moe_intermediate: int
    experts: int
    topk: int
    shared: int
    sigmoid: bool
    groups: int
    topk_groups: int
    renormalize: bool
    scale: float
    attention_bias: bool
    mlp_bias: bool
    interleaved: bool
    tied: bool

    @classmethod
    def read(cls, facts: ModelFacts) -> DeepseekConfig:
        """Return the configuration that the model's config.json states.

        Raises:
            KeyError: config.json lacks a required size.
        """
        c = facts.config
        method = topk_method(facts)
        grouped = method in GROUPED_METHODS
        return cls(
            hidden=facts.hidden_size,
            heads=facts.num_heads,
            nope=c["qk_nope_head_dim"],
            rope=c["qk_rope_head_dim"],
            v=c["v_head_dim"],
            kv_lora=c["kv_lora_rank"],
            q_lora=c.get("q_lora_rank") or None,
            eps=c.get("rms_norm_eps", 1e-6),
            intermediate=c["intermediate_size"],
            moe_intermediate=c.get("moe_intermediate_size") or 0,
            experts=c.get("n_routed_experts") or 0,
            topk=c.get("num_experts_per_tok") or 0,
            shared=c.get("n_shared_experts") or 0,
            sigmoid=method == BIAS_METHOD,
            groups=(c.get("n_group") or 1) if grouped else 1,
            topk_groups=(c.get("topk_group") or 1) if grouped else 1,
            renormalize=_renormalize(c, method),
            scale=float(c.get("routed_scaling_factor") or 1.0),
            attention_bias=bool(c.get("attention_bias")),
            mlp_bias=bool(c.get("mlp_bias")),
            interleaved=c.get("rope_interleave") is not False,
            tied=bool(c.get("tie_word_embeddings")),
        )


def is_dense(facts: ModelFacts, layer: int) -> bool:
    """Return whether layer ``layer`` has a dense MLP instead of experts."""
    return (
        not facts.n_routed_experts
        or layer < stated(facts, "first_k_dense_replace")
        or layer % max(1, stated(facts, "moe_layer_freq", 1)) != 0
    )


def topk_method(facts: ModelFacts) -> str:
    """Return how the gate chooses experts: config.json's ``topk_method``, or its default."""
    return str(facts.config.get("topk_method") or default_method(facts.architecture, facts.config))


def default_method(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the ``topk_method`` of an ``architecture`` whose config.json does not state one."""
    if architecture.startswith("DeepseekV3"):
        return BIAS_METHOD
    return "group_limited_greedy" if (config.get("n_group") or 1) > 1 else "greedy"


def _renormalize(config: Mapping[str, Any], method: str) -> bool:
    given = config.get("norm_topk_prob")
    return method == BIAS_METHOD if given is None else bool(given)
