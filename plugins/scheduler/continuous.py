"""Scheduler with continuous batching: sequences join and leave between steps.

Prompts are computed in chunks, in the same steps as decoding rows.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CacheOffers, SchedulerOffers
from glowplug.core.plugin.options import SchedulerOptions


class ContinuousOptions(SchedulerOptions):
    use: Literal["continuous"] = "continuous"
    mixed: bool = Field(
        True,
        description="combine prompt chunks and decoding rows in one step; False: prompts first",
    )
    share_prefill: int = Field(
        64,
        ge=0,
        description="a request waits while another request's prompt is computed if at least this "
        "many of that prompt's tokens can then be reused; 0: never",
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = super().without_effect(context)
        shares = any(cache.offers.shares for cache in context.of(CacheOffers))
        return (
            found
            if shares
            else {**found, "share_prefill": "the prefix cache does not share prefixes"}
        )


@hookimpl
def register_schedulers() -> list[Component]:
    return [
        Component(
            name="continuous",
            options=ContinuousOptions,
            factory="glowplug.plugins.scheduler.continuous_runtime:Continuous",
            offers=SchedulerOffers(adapts=True, restores=True),
            summary="continuous batching with chunked prefill, preemption by recompute and "
            "shared prefixes",
        )
    ]
