"""The graph runner "eager", which captures nothing: every step runs operation by operation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GraphOffers
from glowplug.core.plugin.options import GraphOptions


class EagerOptions(GraphOptions):
    use: Literal["eager"] = "eager"
    prefill: Literal[False] | None = Field(None, description="this runner captures nothing")

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        return dict.fromkeys(("prefill", "draft_extend"), "no step is captured")


@hookimpl
def register_graph_runners() -> list[Component]:
    return [
        Component(
            name="eager",
            options=EagerOptions,
            factory="glowplug.plugins.graphs.eager_runtime:Eager",
            offers=GraphOffers(),
            summary="no capture",
        )
    ]
