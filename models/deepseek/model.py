"""DeepSeek-V2, V2-Lite, Coder-V2, V3 and R1: latent attention and mixtures of experts, all from
config.json.

DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from pydantic import BaseModel

from glowplug.core.layers.attention import MlaAttention, MlaSizes
from glowplug.core.layers.decoder import DecoderLayer, DecoderModel
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.moe import Moe, MoeSizes
from glowplug.core.layers.rope import Rope, RopeConfig
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Model, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.models.deepseek.config import DeepseekConfig


class DeepseekFamily:
    """``ModelFamily`` of both architectures."""

    def __init__(self, options: BaseModel, plan: EnginePlan, worker: Worker) -> None:
        del options, plan, worker

    def build(self, context: BuildContext) -> DecoderModel:
        config = DeepseekConfig.read(context.facts)
        rope = deepseek_rope(context, config)
        return DecoderModel(
            context,
            lambda ctx, name, layer: deepseek_layer(
                ctx, config, name, layer, ctx.first_layer + layer
            ),
            rope,
            config.eps,
            config.tied,
        )

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        """The checkpoint's NextN layer ``number`` as a model of its own, which shares what it lacks
        with ``target``.

        ``context.first_layer`` is the KV-pool number of the first NextN layer.
        """
        from glowplug.models.deepseek.nextn import DeepseekNextN

        assert isinstance(target, DecoderModel), "the target is what build made"
        return DeepseekNextN(context, target, number)


def deepseek_rope(context: BuildContext, config: DeepseekConfig) -> Rope:
    return Rope(context, RopeConfig.read(context.facts.config), config.rope, config.interleaved)


def deepseek_layer(
    context: BuildContext, config: DeepseekConfig, name: str, layer: int, index: int
) -> DecoderLayer:
    """Layer ``layer`` of the checkpoint; ``index`` is its number in the KV pool."""
    scale = RopeConfig.read(context.facts.config).softmax_scale(config.nope + config.rope)
    sizes = MlaSizes(
        config.hidden,
        config.heads,
        config.nope,
        config.rope,
        config.v,
        config.kv_lora,
        config.q_lora,
        config.attention_bias,
    )
    return DecoderLayer(
        context,
        name,
        config.hidden,
        config.eps,
        MlaAttention(context, f"{name}.self_attn", index, sizes, scale),
        _feed_forward(context, config, f"{name}.mlp", layer),
    )


def _feed_forward(
    context: BuildContext, config: DeepseekConfig, name: str, layer: int
) -> Mlp | Moe:
    if config.dense(layer):
        return Mlp(context, name, config.hidden, config.intermediate, bias=config.mlp_bias)
    return Moe(
        context,
        name,
        MoeSizes(
            hidden=config.hidden,
            width=config.moe_intermediate,
            experts=config.experts,
            topk=config.topk,
            shared=config.shared * config.moe_intermediate,
            sigmoid=config.sigmoid,
            groups=config.groups,
            topk_groups=config.topk_groups,
            renormalize=config.renormalize,
            scale=config.scale,
        ),
    )
