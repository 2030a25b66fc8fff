"""Sizes of a model's layers and the dimensions that ranks split, as its family declares them.

Activation memory is computed from ``LayerSizes``, and a mesh is checked against ``SplitDimension``.
Plan zone: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.facts.mesh import axis_size, deal
from glowplug.core.facts.weight_classes import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    KV_UP,
    SHARED,
    TIED,
    VOCAB,
    WIDTH,
)

#: role -> mesh axis that splits it after all strategies were applied
AXES = {
    VOCAB: "attn_tp",
    TIED: "attn_tp",
    HEADS: "attn_tp",
    KV_HEADS: "attn_tp",
    KV_UP: "attn_tp",
    WIDTH: "tp",
    SHARED: "tp",
    EXPERTS: "moe_tp",
}


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a model's layers that ``ModelFacts`` does not have for every model.

    Attributes:
        value: elements of a head's value; 0 if a value has the same number as a key.
        query_rank: size of the latent of queries; 0 if queries are projected directly.
        width: intermediate size of a dense feed-forward layer.
        expert_width: intermediate size of a routed expert.
        experts_per_token: routed experts of a token.
        shared_experts: size of the shared expert, in routed experts.
        routed: whether each layer has routed experts, next-token layers included; () for none.
        features: of a draft model: hidden states that it reads of each token of its target beside
            the final one.
    """

    value: int = 0
    query_rank: int = 0
    width: int = 0
    expert_width: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    routed: tuple[bool, ...] = ()
    features: int = 0

    def routes(self, layer: int) -> bool:
        """Return whether layer number ``layer`` has routed experts."""
        return layer < len(self.routed) and self.routed[layer]


@dataclass(frozen=True)
class SplitDimension:
    """A dimension of a weight that ranks split. The first layer represents all that are alike.

    Attributes:
        layer: module path of the layer, the first of its kind.
        dimension: name of the dimension, the one in config.json if it has one.
        full: size of the dimension in units.
        role: role of the weight (``weight_classes``). With the role ``KV_HEADS``, there may be
            fewer units than ranks; several ranks then hold the same unit.
        unit: elements per unit.
        quantized: block formats quantise this weight, so it can be split only at multiples of their
            block.
    """

    layer: str
    dimension: str
    full: int
    role: str
    unit: int = 1
    quantized: bool = True

    def parts(self, mesh: Mapping[str, int]) -> int:
        """Return the number of ranks that split the dimension.

        The shared expert is split by all tp ranks, or only by those of a dp group if ``mesh`` has
        the axis "ep".

        Raises:
            ValueError: the axes of ``mesh`` do not divide its tp ranks.
        """
        exchange = self.role == SHARED and "ep" in mesh
        return axis_size("attn_tp" if exchange else AXES[self.role], mesh)

    def divides(self, parts: int, block: int) -> bool:
        """Return whether ``parts`` ranks can split the dimension.

        Args:
            block: block size of the quantization; 1 for none.
        """
        if self.role in (VOCAB, TIED):
            return deal(self.full, parts, parts - 1)[1] > 0
        if self.role == KV_HEADS and self.full < parts:
            return parts % self.full == 0
        whole = block // math.gcd(block, self.unit) if self.quantized else 1
        return self.full % parts == 0 and (parts == 1 or self.full // parts % whole == 0)
