"""A plugin for tests: attention in plain torch that declares causal chains only."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_EAGER, AttentionOffers
from glowplug.core.plugin.options import AttentionOptions
from glowplug.plugins.attention.shared.kv_layout import parted_latent_entries


class ChainsOnlyOptions(AttentionOptions):
    use: Literal["chains_only"] = "chains_only"
    absorb: bool = True


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="chains_only",
            options=ChainsOnlyOptions,
            factory="glowplug.plugins.attention.mla.torch_runtime:TorchMla",
            offers=AttentionOffers(
                kinds=frozenset({"mla"}),
                kv_entries=parted_latent_entries,
                modes=dict(EVERY_MODE_EAGER),
                first_key=True,
            ),
        )
    ]
