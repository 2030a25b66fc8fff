"""DeepSeek-V2, V2-Lite, Coder-V2, V3 and R1, configured by config.json alone.

Latent attention and mixtures of experts: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv
2412.19437).
"""

from __future__ import annotations

from pydantic import BaseModel

from glowplug.core.layers.decoder import DecoderModel
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Model, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.models.deepseek.config import DeepseekConfig
from glowplug.models.deepseek.layers import deepseek_attention, deepseek_layer, deepseek_rope
from glowplug.models.deepseek.nextn import DeepseekNextN
from glowplug.models.eagle.head import build_head


class DeepseekFamily:
    """``ModelFamily`` of DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""

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
        """Build the checkpoint's NextN layer ``number`` as a model of its own.

        Modules that the checkpoint lacks for this layer are shared with ``target``.
        ``context.first_layer`` is the KV-pool index of the first NextN layer.
        """
        assert isinstance(target, DecoderModel), "target must come from build"
        return DeepseekNextN(context, target, number)

    def build_eagle(self, context: BuildContext, target: Model) -> Model:
        """Build an EAGLE-3 head with latent attention."""
        assert isinstance(target, DecoderModel), "target must come from build"
        config = DeepseekConfig.read(context.facts)
        return build_head(
            context,
            target,
            deepseek_rope(context, config),
            lambda ctx, name, inputs: deepseek_attention(
                ctx, config, name, ctx.first_layer, inputs
            ),
        )
