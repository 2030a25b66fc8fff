"""Radix prefix cache: requests with a common prefix share the pages of that prefix."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CacheOffers
from glowplug.core.plugin.options import CacheOptions


class RadixOptions(CacheOptions):
    use: Literal["radix"] = "radix"
    max_pages: int | None = Field(
        None, ge=1, description="maximum number of cached pages; None: all that the pool can spare"
    )


@hookimpl
def register_prefix_caches() -> list[Component]:
    return [
        Component(
            name="radix",
            options=RadixOptions,
            factory="glowplug.plugins.cache.radix_runtime:RadixCache",
            offers=CacheOffers(shares=True),
            summary="shared prefixes in a radix tree of whole pages, salted, evicting least "
            "recently used leaves first",
        )
    ]
