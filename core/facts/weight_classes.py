"""Tensors of a checkpoint by class: how ranks share them and what they become once loaded. Plan
zone: no torch.

The byte budget works on sums a class instead of on tensors: a checkpoint of 671 billion numbers has
ninety thousand tensors, and a plan has to be cheap enough to make ten thousand of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from glowplug.core.facts.model_facts import TensorFact

VOCAB = "vocab"  #: embedding and head
TIED = "tied"  #: an embedding that is the head too; the head keeps a copy of its own
HEADS = "heads"
KV_HEADS = "kv_heads"  #: keys and values of grouped-query attention
KV_UP = "kv_up"  #: from the latent to every head; a CPU keeps copies of it, laid out for absorption
WIDTH = "width"  #: the dense feed-forward layers
SHARED = "shared"  #: the shared expert
EXPERTS = "experts"
ROUTER = "router"  #: the gate, whole and in float32
WHOLE = "whole"  #: latents, norms, and whatever no strategy is known to split

INT4 = "int4"  #: eight numbers an int32, as AWQ packs them
SCALE = "float32"  #: what scales of 8-bit weights are kept in

TARGET = -1  #: ``Kind.draft`` of everything that is not a next-token layer's

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
_ROW_SPLIT = frozenset(
    {"o_proj", "down_proj"}
)  #: their columns are split, so every rank has the whole bias


class Kind(NamedTuple):
    """``role``: one of the names above. ``dtype``: as stored (of scales and zeros: as kept beside
    quantised weights).
    ``scale``: scales or zeros, not weights. ``draft``: number of the next-token layer it belongs
    to, or ``TARGET``.
    """

    role: str
    dtype: str
    scale: bool = False
    draft: int = TARGET


Tally = Mapping[Kind, int]


def role_of(name: str) -> str:
    """The class of a tensor by the names that published checkpoints use."""
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


def tally(tensors: Mapping[str, TensorFact], layers: int, tied: bool = False) -> dict[Kind, int]:
    """Numbers in a checkpoint of ``layers`` layers by kind; layers behind them are next-token
    layers.
    """
    found: dict[Kind, int] = {}
    for name, tensor in tensors.items():
        role = role_of(name)
        if name.endswith("rotary_emb.inv_freq") or tied and name == "lm_head.weight":
            continue  # never read
        if tied and name == "model.embed_tokens.weight":
            role = TIED
        dtype, scale, count = numbers(name, tensor)
        kind = Kind(role, dtype, scale, next_token_layer(name, layers))
        found[kind] = found.get(kind, 0) + count
    return found


def numbers(name: str, tensor: TensorFact) -> tuple[str, bool, int]:
    """``Kind.dtype`` and ``Kind.scale`` of a tensor by its published name, and how many numbers it
    holds.
    """
    count = math.prod(tensor.shape)
    leaf = name.rpartition(".")[2]
    if leaf in ("weight_scale_inv", "weight_scale"):
        return SCALE, True, count
    if leaf in ("qweight", "qzeros") and tensor.dtype == "int32":
        return INT4, leaf == "qzeros", 8 * count
    return tensor.dtype, leaf == "scales", count


def next_token_layer(name: str, layers: int) -> int:
    """Number of the next-token layer a tensor belongs to: those behind the last of ``layers``;
    ``TARGET``: none.
    """
    parts = name.split(".", 3)
    if len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdigit():
        return max(TARGET, int(parts[2]) - layers)
    return TARGET
