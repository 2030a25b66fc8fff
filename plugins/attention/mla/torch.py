"""MLA attention in plain torch, on CPU or CUDA.

Decode and verify rows attend with absorbed weights, prefill rows as multi-head attention over
expanded keys.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_EAGER, AttentionOffers
from glowplug.core.plugin.options import AttentionOptions
from glowplug.plugins.attention.shared.kv_layout import parted_latent_entries


class TorchMlaOptions(AttentionOptions):
    use: Literal["torch_mla"] = "torch_mla"
    absorb: bool = Field(
        True,
        description="absorb W_UK and W_UV in decode and verify steps; false: the naive reference, "
        "which expands every cached latent for every row",
    )


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="torch_mla",
            options=TorchMlaOptions,
            factory="glowplug.plugins.attention.mla.torch_runtime:TorchMla",
            offers=AttentionOffers(
                kinds=frozenset({"mla"}),
                kv_entries=parted_latent_entries,
                modes=dict(EVERY_MODE_EAGER),
                tree=True,
                first_key=True,
            ),
            summary="latent attention in plain torch (CPU and CUDA)",
        )
    ]
