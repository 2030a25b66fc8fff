"""The layout of a rank's KV pool."""

from __future__ import annotations

from glowplug.core.facts.kv_layout import KVEntries, KVEntry, KVLayout, local_heads
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan


def local_kv_heads(plan: EnginePlan) -> int:
    """Return the number of key heads that each rank stores in its KV cache."""
    return local_heads(plan.facts.model.num_kv_heads, axis_size("attn_tp", plan.mesh))


def kv_layout(plan: EnginePlan, entries: KVEntries) -> KVLayout:
    """Return a rank's KV layout, for the model's layers followed by those of the draft.

    Args:
        plan: the plan.
        entries: function that returns the entries of a layer, ``AttentionOffers.kv_entries``.
    """
    model = plan.facts.model
    return KVLayout(
        model.num_layers + plan.sizes.draft_layers,
        plan.sizes.page_size,
        entries(model, plan.kv_dtype, local_kv_heads(plan)),
    )


def parted_latent_entries(model: ModelFacts, dtype: str, heads: int) -> tuple[KVEntry, ...]:
    """Return a layer's KV entries for a cache that keeps ``latent`` and ``rope`` apart.

    All heads share these entries, so ``heads`` has no effect.
    """
    return (
        KVEntry("latent", (model.kv_lora_rank,), dtype),
        KVEntry("rope", (model.qk_rope_head_dim,), dtype),
    )
