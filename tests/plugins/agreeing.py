"""The plugin of a weight source for drafts that hit now and then: random weights which a NextN
layer can profit from.

With plain random weights a draft hits once in a vocabulary. Here what a layer adds to the residual
stream is kept small, and the NextN layer hands the embedding of the last token on, so target and
draft often agree.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import WeightOffers
from glowplug.plugins.weights.random import RandomOptions


class AgreeingOptions(RandomOptions):
    use: Literal["agreeing"] = "agreeing"  # type: ignore[assignment]
    spread: float = Field(0.8, ge=0, description="how much layers add to the residual stream")


@hookimpl
def register_weight_sources() -> list[Component]:
    return [
        Component(
            "agreeing",
            AgreeingOptions,
            "tests.plugins.agreeing_runtime:AgreeingSource",
            offers=WeightOffers(formats=frozenset({"synthetic"})),
            summary="random, and drafts hit",
        )
    ]
