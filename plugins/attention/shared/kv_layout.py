"""The entries of the KV cache that backends of this folder share."""

from __future__ import annotations

from glowplug.core.facts.kv_layout import KVContext, KVEntry


def parted_latent_entries(context: KVContext) -> tuple[KVEntry, ...]:
    """Return a layer's KV entries for a cache that keeps ``latent`` and ``rope`` apart.

    All heads share these entries.
    """
    return (
        KVEntry("latent", (context.model.kv_lora_rank,), context.dtype),
        KVEntry("rope", (context.model.qk_rope_head_dim,), context.dtype),
    )
