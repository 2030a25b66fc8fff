"""Llama and models with its architecture.

Grouped-query attention, gated feed-forward layers, NeoX rope with any published scaling.
"""

from __future__ import annotations

from pydantic import BaseModel

from glowplug.core.layers.attention import MhaAttention
from glowplug.core.layers.decoder import DecoderLayer, DecoderModel
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.rope import Rope, RopeConfig
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Model, Worker
from glowplug.core.protocols.build_context import BuildContext


class LlamaFamily:
    """``ModelFamily`` of LlamaForCausalLM."""

    def __init__(self, options: BaseModel, plan: EnginePlan, worker: Worker) -> None:
        del options, plan, worker

    def build(self, context: BuildContext) -> DecoderModel:
        facts = context.facts
        rope = Rope(context, RopeConfig.read(facts.config), facts.head_dim, interleaved=False)
        return DecoderModel(
            context,
            llama_layer,
            rope,
            facts.config.get("rms_norm_eps", 1e-6),
            bool(facts.config.get("tie_word_embeddings")),
        )

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        raise NotImplementedError(
            "Llama checkpoints have no NextN layer (the family does not offer one)"
        )


def llama_layer(context: BuildContext, name: str, layer: int) -> DecoderLayer:
    facts = context.facts
    config = facts.config
    attention = MhaAttention(
        context,
        f"{name}.self_attn",
        context.first_layer + layer,
        hidden=facts.hidden_size,
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
        bias=bool(config.get("attention_bias")),
    )
    mlp = Mlp(
        context,
        f"{name}.mlp",
        facts.hidden_size,
        config["intermediate_size"],
        bias=bool(config.get("mlp_bias")),
    )
    return DecoderLayer(
        context, name, facts.hidden_size, config.get("rms_norm_eps", 1e-6), attention, mlp
    )
