"""No prefix cache: every prompt is computed in full."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CacheOffers
from glowplug.core.plugin.options import CacheOptions


class NoCacheOptions(CacheOptions):
    use: Literal["none"] = "none"


@hookimpl
def register_prefix_caches() -> list[Component]:
    return [
        Component(
            name="none",
            options=NoCacheOptions,
            factory="glowplug.plugins.cache.none_runtime:NoCache",
            offers=CacheOffers(shares=False),
            summary="caches no prefixes",
        )
    ]
