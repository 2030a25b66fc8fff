"""No parallelism: one rank holds the whole model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ParallelOffers
from glowplug.core.plugin.options import ParallelOptions


class SingleOptions(ParallelOptions):
    use: Literal["single"] = "single"
    size: int = Field(1, ge=1, le=1, description="always one rank")


@hookimpl
def register_parallel_strategies() -> list[Component]:
    return [
        Component(
            name="single",
            options=SingleOptions,
            factory="glowplug.plugins.parallel.single_runtime:Single",
            offers=ParallelOffers(exchanges=False),
            summary="one rank, no sharding",
        )
    ]
