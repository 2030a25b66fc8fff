"""Names of a decoder's modules in checkpoints, for layers and inventories alike. No torch."""

from __future__ import annotations

from dataclasses import dataclass

#: names of the gate, up and down projections in most checkpoints
MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DecoderNames:
    """Names of a decoder's modules; the defaults are those of the Hugging Face layout.

    A family passes the same names to the functions of ``decoder_tensors``, which declare tensors,
    and to the layers, which load them.

    Attributes:
        embedding: path of the token embedding.
        layer: path of a layer; ``{layer}`` stands for its number.
        norm: path of the final norm.
        head: path of the output head.
        norms: within a layer, the norms before attention and before the feed-forward part.
        attention: within a layer, attention.
        projections: within attention, the projections to queries, keys and values, and the output
            projection.
        qk_norms: within attention, the norms of queries and of keys.
        mlp: within a layer, a dense feed-forward part.
        matrices: within a dense feed-forward part, the gate, up and down projections.
        moe: within a layer, a feed-forward part with experts.
        router: within a feed-forward part with experts, the router.
        experts: within a feed-forward part with experts, the routed experts, whose numbers follow.
        expert_matrices: within an expert, the gate, up and down projections.
        shared: within a feed-forward part with experts, the shared expert, whose projections have
            the names of ``expert_matrices``.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{layer}"
    norm: str = "model.norm"
    head: str = "lm_head"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    mlp: str = "mlp"
    matrices: tuple[str, str, str] = MATRICES
    moe: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    expert_matrices: tuple[str, str, str] = MATRICES
    shared: str = "shared_experts"

    @property
    def layer_prefix(self) -> str:
        """Beginning of the names of layers' tensors, for ``ModelOffers.layer_prefix``."""
        return self.layer.partition("{layer}")[0]

    def within(self, *names: str) -> str:
        """Return the path of a module inside a layer, with ``{layer}`` for the layer's number."""
        return ".".join((self.layer, *names))


PUBLISHED = DecoderNames()
