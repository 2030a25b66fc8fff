"""Decoder layers of the DeepSeek family: latent attention, and a dense MLP or experts."""

from __future__ import annotations

from glowplug.core.layers.attention import MlaAttention, MlaNames, MlaSizes
from glowplug.core.layers.decoder import DecoderLayer
from glowplug.core.layers.gate import MoeSizes
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.moe import Moe
from glowplug.core.layers.rope import Rope, RopeConfig
from glowplug.core.protocols.build_context import BuildContext
from glowplug.models.deepseek.config import DeepseekConfig, is_dense

#: modules of an attention layer in published checkpoints
NAMES = MlaNames(
    query="q_proj",
    query_down="q_a_proj",
    query_norm="q_a_layernorm",
    query_up="q_b_proj",
    kv_down="kv_a_proj_with_mqa",
    kv_norm="kv_a_layernorm",
    kv_up="kv_b_proj",
    output="o_proj",
)


def deepseek_rope(context: BuildContext, config: DeepseekConfig) -> Rope:
    return Rope(context, RopeConfig.read(context.facts.config), config.rope, config.interleaved)


def deepseek_layer(
    context: BuildContext, config: DeepseekConfig, name: str, layer: int, index: int
) -> DecoderLayer:
    """Build one DeepSeek decoder layer: latent attention, then a dense MLP or experts.

    Args:
        layer: index of the layer in the checkpoint.
        index: index of the layer in the KV pool.
    """
    return DecoderLayer(
        context,
        name,
        config.hidden,
        config.eps,
        deepseek_attention(context, config, f"{name}.self_attn", index),
        _feed_forward(context, config, f"{name}.mlp", layer),
    )


def deepseek_attention(
    context: BuildContext,
    config: DeepseekConfig,
    name: str,
    index: int,
    inputs: int | None = None,
) -> MlaAttention:
    """Build the latent attention of one layer.

    Args:
        index: index of the layer in the KV pool.
        inputs: size of its input; None: the hidden size.
    """
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
        inputs,
    )
    return MlaAttention(context, name, index, sizes, scale, NAMES)


def _feed_forward(
    context: BuildContext, config: DeepseekConfig, name: str, layer: int
) -> Mlp | Moe:
    if is_dense(context.facts, layer):
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
