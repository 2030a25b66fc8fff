"""Grouped-query attention with NeoX rotation: of Llama targets, and of their heads in training.

Shapes: B sequences, T tokens, D hidden, H query heads, N channels of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.layers.rope import RopeConfig
from glowplug.models.eagle.training.head import Angles, ChainedAttention
from glowplug.models.embedded.training.network import TrainingLinear


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Dimensions of grouped-query attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, facts: ModelFacts) -> "GroupedShape":
        """Return the dimensions of a model's attention."""
        return cls(facts.hidden_size, facts.num_heads, facts.num_kv_heads, facts.head_dim)


def frequencies(facts: ModelFacts) -> Tensor:
    """Return the inverse rotary frequencies of a model without rope scaling, [head_dim / 2].

    Raises:
        ValueError: the model's rotary embedding is scaled.
    """
    rope = RopeConfig.read(facts.config)
    if rope.scaling is not None:
        raise ValueError(f"{facts.path} scales its rotary embedding, which is not built here")
    exponents = torch.arange(0, facts.head_dim, 2, dtype=torch.float32) / facts.head_dim
    found: Tensor = rope.theta**-exponents
    return found


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate elements i and i + N / 2 of x [B, T, heads, N] by the angles [..., T, 1, N / 2]."""
    one, two = x.float().chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)


class GroupedHeadAttention(ChainedAttention, nn.Module):
    """Grouped-query attention of an EAGLE-3 head, in the published form of Llama heads."""

    def __init__(self, shape: GroupedShape) -> None:
        super().__init__()
        self.shape = shape
        self.scale = shape.head_dim**-0.5
        inputs = 2 * shape.hidden
        self.q_proj = TrainingLinear(inputs, shape.heads * shape.head_dim)
        self.k_proj = TrainingLinear(inputs, shape.kv_heads * shape.head_dim)
        self.v_proj = TrainingLinear(inputs, shape.kv_heads * shape.head_dim)
        self.o_proj = TrainingLinear(shape.heads * shape.head_dim, shape.hidden, zero=True)

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        return rotate_halves(self._heads(self.q_proj(x)), *angles).transpose(1, 2)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        k = rotate_halves(self._heads(self.k_proj(x)), *angles)
        v = self._heads(self.v_proj(x))
        each = self.shape.heads // self.shape.kv_heads
        k, v = (part.repeat_interleave(each, dim=2).transpose(1, 2) for part in (k, v))
        return k, v

    def _heads(self, x: Tensor) -> Tensor:
        """Return x [B, T, heads * N] as [B, T, heads, N]."""
        return x.view(*x.shape[:-1], -1, self.shape.head_dim)
