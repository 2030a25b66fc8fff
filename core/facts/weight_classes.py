"""Classes of checkpoint tensors that are split over ranks and stored alike. Plan zone: no torch.

The byte budget uses sums per class instead of tensors: a checkpoint of 671 billion parameters has
ninety thousand tensors, and planning must be fast enough to make ten thousand plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from glowplug.core.facts.model_facts import TensorFact

VOCAB = "vocab"  #: embedding and head
TIED = "tied"  #: an embedding that is also the head, which keeps a copy of its own
HEADS = "heads"  #: attention weights that are split by heads
KV_HEADS = "kv_heads"  #: keys and values of grouped-query attention
#: up-projection of the latent to all heads; a CPU keeps copies, laid out for absorption
KV_UP = "kv_up"
WIDTH = "width"  #: dense feed-forward layers, which are split by width
SHARED = "shared"  #: the shared expert
EXPERTS = "experts"  #: routed experts
ROUTER = "router"  #: the expert gate, whole on every rank and in float32
WHOLE = "whole"  #: latents, norms and all other tensors that no known strategy splits

INT4 = "int4"  #: dtype of AWQ's weights, eight elements per int32
SCALE = "float32"  #: dtype in which scales of 8-bit weights are kept

TARGET = -1  #: ``WeightKind.draft`` of tensors that do not belong to a next-token layer

_BY_MODULE = {
    "embed_tokens": VOCAB,
    "lm_head": VOCAB,
    "head": VOCAB,
    "q_proj": HEADS,
    "q_b_proj": HEADS,
    "o_proj": HEADS,
    "k_proj": KV_HEADS,
    "v_proj": KV_HEADS,
    "kv_b_proj": KV_UP,
    "gate": ROUTER,
}
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
#: layers whose input is split over ranks, so that every rank has the whole bias
_ROW_SPLIT = frozenset({"o_proj", "down_proj"})


class WeightKind(NamedTuple):
    """A class of tensors.

    Attributes:
        role: one of the roles above.
        dtype: dtype of stored weights; of scales and zero points, the one in which they are kept
            beside quantised weights.
        scale: the tensors hold scales or zero points instead of weights.
        draft: number of their next-token layer, or ``TARGET``.
    """

    role: str
    dtype: str
    scale: bool = False
    draft: int = TARGET


Tally = Mapping[WeightKind, int]  #: number of elements by kind


def role_of(name: str) -> str:
    """Return the role of a tensor by its name in published checkpoints."""
    module, _, leaf = name.rpartition(".")
    above, _, last = module.rpartition(".")
    if last in _MLP:
        if leaf == "bias" and last in _ROW_SPLIT:
            return WHOLE
        if above.rpartition(".")[2].isdigit() and ".experts." in above:
            return EXPERTS
        return SHARED if above.endswith("shared_experts") else WIDTH
    if leaf == "bias" and last in _ROW_SPLIT:
        return WHOLE
    return _BY_MODULE.get(last, WHOLE)


def tally(
    tensors: Mapping[str, TensorFact], layers: int, tied: bool = False
) -> dict[WeightKind, int]:
    """Return the element counts of a checkpoint by kind.

    Args:
        layers: number of layers of the model; later layers are next-token layers.
        tied: the embedding is also the head.
    """
    found: dict[WeightKind, int] = {}
    for name, tensor in tensors.items():
        role = role_of(name)
        if name.endswith("rotary_emb.inv_freq") or tied and name == "lm_head.weight":
            continue  # these tensors are not loaded
        if tied and name == "model.embed_tokens.weight":
            role = TIED
        dtype, scale, count = numbers(name, tensor)
        kind = WeightKind(role, dtype, scale, next_token_layer(name, layers))
        found[kind] = found.get(kind, 0) + count
    return found


def numbers(name: str, tensor: TensorFact) -> tuple[str, bool, int]:
    """Return (``WeightKind.dtype``, ``WeightKind.scale``, number of elements) of a tensor.

    Args:
        name: name of the tensor in published checkpoints.
    """
    count = math.prod(tensor.shape)
    leaf = name.rpartition(".")[2]
    if leaf in ("weight_scale_inv", "weight_scale"):
        return SCALE, True, count
    if leaf in ("qweight", "qzeros") and tensor.dtype == "int32":
        return INT4, leaf == "qzeros", 8 * count
    return tensor.dtype, leaf == "scales", count


def next_token_layer(name: str, layers: int) -> int:
    """Return the number of the next-token layer that a tensor belongs to, or ``TARGET``.

    Next-token layers follow the ``layers`` layers of the model.
    """
    parts = name.split(".", 3)
    if len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdigit():
        return max(TARGET, int(parts[2]) - layers)
    return TARGET
