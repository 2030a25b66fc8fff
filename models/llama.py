"""Llama and models with its architecture.

Grouped-query attention, gated feed-forward layers, NeoX rope with any published scaling.
"""

from __future__ import annotations

from pydantic import BaseModel

from glowplug.core.layers.decoder import DecoderLayer, DecoderModel
from glowplug.core.layers.mha import MhaAttention
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.rope import Rope, RopeConfig
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Model, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.models.eagle.head import build_head


class LlamaFamily:
    """``ModelFamily`` of LlamaForCausalLM."""

    def __init__(self, options: BaseModel, plan: EnginePlan, worker: Worker) -> None:
        del options, plan, worker

    def build(self, context: BuildContext) -> DecoderModel:
        facts = context.facts
        return DecoderModel(
            context,
            llama_layer,
            llama_rope(context),
            facts.config.get("rms_norm_eps", 1e-6),
            bool(facts.config.get("tie_word_embeddings")),
        )

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        raise NotImplementedError(
            "Llama checkpoints have no NextN layer (the family does not offer one)"
        )

    def build_eagle(self, context: BuildContext, target: Model) -> Model:
        """Build an EAGLE head with grouped-query attention."""
        assert isinstance(target, DecoderModel), "target must come from build"
        return build_head(
            context,
            target,
            llama_rope(context),
            lambda ctx, name, inputs: llama_attention(ctx, name, 0, inputs),
        )


def llama_rope(context: BuildContext) -> Rope:
    facts = context.facts
    return Rope(context, RopeConfig.read(facts.config), facts.head_dim, interleaved=False)


def llama_attention(
    context: BuildContext, name: str, layer: int, inputs: int | None = None
) -> MhaAttention:
    """Build the attention of one layer; ``inputs``: size of its input, None for the hidden size."""
    facts = context.facts
    return MhaAttention(
        context,
        name,
        context.first_layer + layer,
        hidden=facts.hidden_size,
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
        bias=bool(facts.config.get("attention_bias")),
        inputs=inputs,
    )


def llama_layer(context: BuildContext, name: str, layer: int) -> DecoderLayer:
    facts = context.facts
    config = facts.config
    attention = llama_attention(context, f"{name}.self_attn", layer)
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
