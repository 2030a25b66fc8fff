"""The declaration of the attention backend "chunked". It imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.api import (
    EVERY_MODE_EAGER,
    AttentionOffers,
    AttentionOptions,
    Component,
    KVContext,
    KVEntry,
    hookimpl,
)


class ChunkedOptions(AttentionOptions):
    use: Literal["chunked"] = "chunked"
    keys: int = Field(256, ge=1, description="keys of a chunk")
    exact: int = Field(
        1, ge=0, description="first layers that keep latents in the cache's dtype, not in int8"
    )


def entries(context: KVContext) -> tuple[KVEntry, ...]:
    """Return the entries of two groups of layers: exact ones, and those with 8-bit latents."""
    latent, rope = context.model.kv_lora_rank, context.model.qk_rope_head_dim
    first = tuple(range(min(context.options.exact, context.layers)))
    others = tuple(range(len(first), context.layers))
    found = (
        KVEntry("latent", (latent,), context.dtype, first),
        KVEntry("codes", (latent,), "int8", others),
        KVEntry("scale", (1,), "float16", others),
        KVEntry("rope", (rope,), context.dtype),
    )
    return tuple(entry for entry in found if entry.layers != ())


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="chunked",
            options=ChunkedOptions,
            factory="glowplug_chunked.runtime:Chunked",
            offers=AttentionOffers(
                devices=frozenset({"cpu"}),
                kinds=frozenset({"mla"}),
                kv_entries=entries,
                modes=dict(EVERY_MODE_EAGER),
                first_key=True,
            ),
            summary="latent attention in chunks of keys over int8 latents (CPU)",
        )
    ]
