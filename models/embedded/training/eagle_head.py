"""The embedded model's EAGLE-3 head in the form of DeepSeek's latent attention, for training."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glowplug.models.eagle.training.head import (
    Angles,
    ChainedAttention,
    HeadSizes,
    TrainingEagleHead,
)
from glowplug.models.embedded.training.network import Attention, Network, TrainingLinear, rotate
from glowplug.models.embedded.training.shape import NetworkShape

FEATURE_LAYERS = (1, 3, 5)  #: numbers of target layers after which features are read


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Dimensions of the head in which it differs from its target."""

    q_rank: int = 64
    width: int = 320


class HeadAttention(ChainedAttention, Attention):
    """Latent attention of the head."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.scale = shape.softmax_scale
        self.q_a_proj = TrainingLinear(2 * shape.hidden, shape.q_rank)
        self.kv_a_proj_with_mqa = TrainingLinear(2 * shape.hidden, shape.kv_rank + shape.rope)

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        s = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(
            -1, (s.heads, s.nope + s.rope)
        )
        q_nope, q_rope = q.split((s.nope, s.rope), dim=-1)
        return torch.cat((q_nope, rotate(q_rope, *angles)), dim=-1).transpose(1, 2)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        s = self.shape
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((s.kv_rank, s.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, s.nope + s.value))
        k_nope, v = kv.split((s.nope, s.value), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(-2), *angles).expand(*k_nope.shape[:-1], s.rope)
        return torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2), v.transpose(1, 2)


def latent_head(target: NetworkShape, shape: HeadShape) -> TrainingEagleHead:
    """Return a new head for a target of these dimensions."""
    sizes = HeadSizes(target.hidden, shape.width, len(FEATURE_LAYERS), target.epsilon)
    return TrainingEagleHead(sizes, HeadAttention(replace(target, q_rank=shape.q_rank)))


@torch.no_grad()
def target_states(network: Network, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's embeddings, features [B, T, layers * D] and normed hidden states.

    Args:
        network: the target.
        tokens: [B, T].
        mask: bool [B, 1, T, T], the tokens that each token attends to.
    """
    cos, sin = network.angles(tokens.shape[1])
    embedded = network.embed_tokens(tokens)
    x = embedded
    streams = []
    for number, layer in enumerate(network.layers, 1):
        x = layer(x, cos, sin, mask)
        if number in FEATURE_LAYERS:
            streams.append(x)
    return embedded, torch.cat(streams, dim=-1), network.norm(x)
