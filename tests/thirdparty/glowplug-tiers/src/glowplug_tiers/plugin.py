"""The declaration of the prefix cache "tiers". It imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.api import CacheOffers, CacheOptions, Component, Tier, hookimpl


class TiersOptions(CacheOptions):
    use: Literal["tiers"] = "tiers"
    host_bytes: int = Field(1 << 30, ge=0, description="host memory of each rank; 0: no tier")


@hookimpl
def register_prefix_caches() -> list[Component]:
    return [
        Component(
            name="tiers",
            options=TiersOptions,
            factory="glowplug_tiers.runtime:Tiers",
            offers=CacheOffers(tier=Tier("host_bytes")),
            contract=2,
            summary="shared prefixes by page; evicted pages stay in host memory",
        )
    ]
