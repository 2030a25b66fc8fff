"""Collectives of one rank, which return their input."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.core.plugin.options import CollectivesOptions


class LocalOptions(CollectivesOptions):
    use: Literal["local"] = "local"


@hookimpl
def register_collectives() -> list[Component]:
    return [
        Component(
            name="local",
            options=LocalOptions,
            factory="glowplug.plugins.collectives.local_runtime:Local",
            offers=CollectiveOffers(ranks=False, expandable_segments=True),
            summary="one rank without communication",
        )
    ]
