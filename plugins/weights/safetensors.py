"""Weights from safetensors files, checked before allocation and read in memory-mapped slices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import OPERATIONAL, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import WeightOffers
from glowplug.core.plugin.options import WeightOptions


class SafetensorsOptions(WeightOptions):
    use: Literal["safetensors"] = "safetensors"
    progress: bool = Field(
        True,
        description="show a progress bar when standard error is a terminal",
        json_schema_extra=OPERATIONAL,
    )


@hookimpl
def register_weight_sources() -> list[Component]:
    return [
        Component(
            name="safetensors",
            options=SafetensorsOptions,
            factory="glowplug.plugins.weights.safetensors_runtime:SafetensorsSource",
            offers=WeightOffers(formats=frozenset({"safetensors"})),
            summary="safetensors files, checked before loading and memory-mapped",
        )
    ]
