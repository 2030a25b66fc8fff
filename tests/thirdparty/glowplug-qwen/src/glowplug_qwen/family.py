"""The runtime of the model family "qwen"."""

from __future__ import annotations

from glowplug.core.api import EnginePlan, ModelFacts
from glowplug.core.layers.decoder import DecoderLayer, DecoderModel
from glowplug.core.layers.gate import MoeSizes
from glowplug.core.layers.mha import MhaAttention
from glowplug.core.layers.mlp import Mlp
from glowplug.core.layers.moe import Moe
from glowplug.core.layers.rope import Rope, RopeConfig
from glowplug.core.protocols import BuildContext, Model, Worker
from glowplug_qwen.plugin import QwenOptions, routed


class QwenFamily:
    """``ModelFamily`` of Qwen2, Qwen3 and Qwen3-MoE."""

    def __init__(self, options: QwenOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def build(self, context: BuildContext) -> DecoderModel:
        facts, config = context.facts, context.facts.config
        rope = Rope(context, RopeConfig.read(config), facts.head_dim, interleaved=False)
        tied = bool(config.get("tie_word_embeddings"))
        return DecoderModel(context, layer, rope, config["rms_norm_eps"], tied)

    def build_nextn(self, context: BuildContext, target: Model, number: int = 0) -> Model:
        raise NotImplementedError("the family does not offer NextN layers")

    def build_eagle(self, context: BuildContext, target: Model) -> Model:
        raise NotImplementedError("the family does not offer EAGLE heads")


def layer(context: BuildContext, name: str, number: int) -> DecoderLayer:
    """Build one layer, whose feed-forward part is dense or has experts."""
    facts, config = context.facts, context.facts.config
    hidden, eps, has = facts.hidden_size, config["rms_norm_eps"], config["attention_has"]
    attention = MhaAttention(
        context,
        f"{name}.self_attn",
        context.first_layer + number,
        hidden=hidden,
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.head_dim**-0.5,
        bias=has["bias"],
        out_bias=has["out_bias"],
        qk_norm_eps=eps if has["qk_norm"] else None,
    )
    mlp: Mlp | Moe
    if routed(facts)[number]:
        mlp = Moe(context, f"{name}.mlp", moe_sizes(facts))
    else:
        mlp = Mlp(context, f"{name}.mlp", hidden, config["intermediate_size"])
    return DecoderLayer(context, name, hidden, eps, attention, mlp)


def moe_sizes(facts: ModelFacts) -> MoeSizes:
    """Return the sizes of a layer with experts, which has no shared one."""
    width, topk = facts.config["moe_intermediate_size"], facts.config["num_experts_per_tok"]
    sizes = (facts.hidden_size, width, facts.n_routed_experts, topk)
    again = bool(facts.config.get("norm_topk_prob"))
    return MoeSizes(*sizes, shared=0, sigmoid=False, renormalize=again)
