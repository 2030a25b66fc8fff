"""Classes of checkpoint tensors, for counting their bytes. Plan zone: no torch.

All tensors of a class are split over ranks, and stored after loading, in the same way.

The byte budget uses sums per class instead of tensors: a checkpoint of 671 billion parameters has
ninety thousand tensors, and planning must be fast enough to make ten thousand plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

VOCAB = "vocab"  #: embedding and head
TIED = "tied"  #: an embedding that is also the head, which keeps a copy of its own
HEADS = "heads"  #: attention weights that are split by heads
KV_HEADS = "kv_heads"  #: keys and values of grouped-query attention
#: up-projection of the latent to all heads; a CPU keeps copies, laid out for absorption
KV_UP = "kv_up"
WIDTH = "width"  #: dense feed-forward layers, which are split by width
SHARED = "shared"  #: the shared expert
EXPERTS = "experts"  #: routed experts
ROUTER = "router"  #: the expert gate, whole on every rank; counted in float32
WHOLE = "whole"  #: latents, norms and all other tensors that no known strategy splits

TARGET = -1  #: ``WeightKind.draft`` of tensors that do not belong to a next-token layer
LAYER_PREFIX = "model.layers."  #: usual beginning of the names of a layer's tensors


class WeightKind(NamedTuple):
    """A class of checkpoint tensors, whose elements are counted together.

    Attributes:
        role: one of the roles of this module, such as ``HEADS``.
        kept: bytes of an element as its quantization scheme keeps it after loading; 0 for elements
            that are loaded in the compute dtype.
        scale: the tensors hold scales or zero points instead of weights.
        draft: number of their next-token layer, or ``TARGET``.
    """

    role: str
    kept: float = 0
    scale: bool = False
    draft: int = TARGET


Tally = Mapping[WeightKind, int]  #: number of elements by kind


def next_token_layer(name: str, layers: int, prefix: str = LAYER_PREFIX) -> int:
    """Return the number of the next-token layer that a tensor belongs to, or ``TARGET``.

    Next-token layers follow the ``layers`` layers of the model.

    Args:
        name: name of the tensor.
        layers: number of layers of the model.
        prefix: beginning of the names of layers' tensors, which the layer's number follows.
    """
    if not name.startswith(prefix):
        return TARGET
    number, dot, _ = name[len(prefix) :].partition(".")
    return max(TARGET, int(number) - layers) if dot and number.isdigit() else TARGET
