"""No speculation: the algorithm of width one, so that the engine loop has no special case."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import SpeculativeOffers
from glowplug.core.plugin.speculative_options import SpeculativeOptions


class NoSpeculationOptions(SpeculativeOptions):
    use: Literal["none"] = "none"


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="none",
            options=NoSpeculationOptions,
            factory="glowplug.plugins.speculative.none_runtime:NoSpeculation",
            offers=SpeculativeOffers(drafts=False),
            summary="one token per row and step",
        )
    ]
