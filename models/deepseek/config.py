"""The part of a DeepSeek config.json that the model is built from. V2, V2-Lite, Coder-V2, V3 and
R1. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.core.facts.model_facts import ModelFacts

GROUPED = frozenset({"group_limited_greedy", "noaux_tc"})
TOPK_METHODS = GROUPED | {"greedy"}


@dataclass(frozen=True)
class DeepseekConfig:
    """Names as in config.json. ``sigmoid``: V3's gate; ``groups`` is 1 where the gate is not
    limited to groups.
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
    first_dense: int
    moe_every: int
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
        """From the model's facts. KeyError for a size that config.json does not state."""
        c = facts.config
        method = topk_method(facts)
        grouped = method in GROUPED
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
            first_dense=c.get("first_k_dense_replace") or 0,
            moe_every=c.get("moe_layer_freq") or 1,
            sigmoid=method == "noaux_tc",
            groups=(c.get("n_group") or 1) if grouped else 1,
            topk_groups=(c.get("topk_group") or 1) if grouped else 1,
            renormalize=_renormalize(c, method),
            scale=float(c.get("routed_scaling_factor") or 1.0),
            attention_bias=bool(c.get("attention_bias")),
            mlp_bias=bool(c.get("mlp_bias")),
            interleaved=c.get("rope_interleave") is not False,
            tied=bool(c.get("tie_word_embeddings")),
        )

    def dense(self, layer: int) -> bool:
        """Has this layer a plain feed-forward part?"""
        return not self.experts or layer < self.first_dense or layer % self.moe_every != 0


def topk_method(facts: ModelFacts) -> str:
    """``topk_method``, or what the family means when its config does not say."""
    stated = facts.config.get("topk_method")
    if stated:
        return str(stated)
    return "noaux_tc" if facts.architecture.startswith("DeepseekV3") else "greedy"


def _renormalize(config: Mapping[str, Any], method: str) -> bool:
    stated = config.get("norm_topk_prob")
    return method == "noaux_tc" if stated is None else bool(stated)
