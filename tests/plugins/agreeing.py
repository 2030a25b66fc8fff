"""A plugin with a weight source for drafts that are sometimes accepted: random weights from which a
NextN layer can profit.

With plain random weights a draft is accepted once in a vocabulary. Here the values that a layer
adds to the residual stream are small, and the NextN layer passes the embedding of the last token
on, so target and draft often agree.
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
