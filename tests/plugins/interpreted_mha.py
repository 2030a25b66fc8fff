"""A plugin for tests: ``triton_mha`` on the CPU with Triton's interpreter, so that engines run over
its kernels.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers
from glowplug.core.plugin.options import AttentionOptions


class InterpretedMhaOptions(AttentionOptions):
    use: Literal["interpreted_mha"] = "interpreted_mha"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="interpreted_mha",
            options=InterpretedMhaOptions,
            factory="glowplug.plugins.attention.mha.triton_runtime:TritonMha",
            offers=AttentionOffers(
                kinds=frozenset({"mha"}), modes=dict(EVERY_MODE_GRAPH), tree=True, first_key=True
            ),
        )
    ]
