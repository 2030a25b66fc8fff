"""The attention entries of a rank's KV pool."""

from __future__ import annotations

from glowplug.core.facts.kv_layout import KVEntry, KVLayout
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import EnginePlan


def kv_layers(plan: EnginePlan) -> int:
    """Return the number of layers with a cache: the model's layers, then the draft's."""
    return plan.facts.model.num_layers + plan.sizes.draft_layers


def local_kv_heads(plan: EnginePlan) -> int:
    """Return the key heads of a rank: its share, or one head that other ranks hold, too."""
    return max(1, plan.facts.model.num_kv_heads // axis_size("attn_tp", plan.mesh))


def mha_layout(plan: EnginePlan) -> KVLayout:
    """Return the layout with entries ``k`` and ``v``, each [key heads of the rank, D]."""
    shape = (local_kv_heads(plan), plan.facts.model.head_dim)
    return KVLayout(
        kv_layers(plan),
        plan.sizes.page_size,
        (KVEntry("k", shape, plan.kv_dtype), KVEntry("v", shape, plan.kv_dtype)),
    )
