"""The graph runner "eager": captures nothing, so every step runs operation by operation."""
from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.component import Component
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import GraphOffers
from glowplug.core.options import GraphOptions


class EagerOptions(GraphOptions):
    use: Literal["eager"] = "eager"
    prefill: Literal[False] | None = Field(None, description="nothing is replayed")


@hookimpl
def register_graph_runners() -> list[Component]:
    return [Component(
        name="eager", options=EagerOptions, factory="glowplug.plugins.graphs.eager_runtime:Eager",
        offers=GraphOffers(), summary="no capture")]
