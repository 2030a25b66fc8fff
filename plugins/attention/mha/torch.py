"""Multi-head, grouped-query and multi-query attention in plain torch, on CPU or CUDA."""

from __future__ import annotations

from typing import Literal

from glowplug.core.facts.kv_layout import head_entries
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_EAGER, AttentionOffers
from glowplug.core.plugin.options import AttentionOptions


class TorchMhaOptions(AttentionOptions):
    use: Literal["torch_mha"] = "torch_mha"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="torch_mha",
            options=TorchMhaOptions,
            factory="glowplug.plugins.attention.mha.torch_runtime:TorchMha",
            offers=AttentionOffers(
                kinds=frozenset({"mha"}),
                kv_entries=head_entries,
                modes=dict(EVERY_MODE_EAGER),
                tree=True,
                first_key=True,
            ),
            summary="multi-head and grouped-query attention in plain torch (CPU and CUDA)",
        )
    ]
