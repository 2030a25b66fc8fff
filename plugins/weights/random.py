"""Synthetic weights: each tensor is generated from a seed and its name; no file is read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import WeightOffers
from glowplug.core.plugin.options import WeightOptions


class RandomOptions(WeightOptions):
    use: Literal["random"] = "random"
    seed: int | None = Field(None, ge=0, description="seed of the weights; None: the engine's seed")


@hookimpl
def register_weight_sources() -> list[Component]:
    return [
        Component(
            name="random",
            options=RandomOptions,
            factory="glowplug.plugins.weights.random_runtime:RandomSource",
            offers=WeightOffers(formats=frozenset({"synthetic"})),
            summary="seeded random weights of realistic scale, without any file",
        )
    ]
