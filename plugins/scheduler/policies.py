"""Scheduling policies: the order of admission, and the victim when the pages run out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import PolicyOffers
from glowplug.core.plugin.options import PolicyOptions

RUNTIME = "glowplug.plugins.scheduler.policies_runtime"


class FcfsOptions(PolicyOptions):
    use: Literal["fcfs"] = "fcfs"


class PriorityOptions(PolicyOptions):
    use: Literal["priority"] = "priority"


class LongestPrefixOptions(PolicyOptions):
    use: Literal["longest_prefix"] = "longest_prefix"
    window: int = Field(
        128,
        ge=1,
        description="number of requests at the head of the queue that are ordered by prefix",
    )
    patience: float = Field(
        10.0,
        ge=0,
        description="a request that arrived this many seconds before the newest one "
        "is no longer overtaken",
    )


@hookimpl
def register_scheduling_policies() -> list[Component]:
    return [
        Component(
            name="fcfs",
            options=FcfsOptions,
            factory=f"{RUNTIME}:Fcfs",
            offers=PolicyOffers(),
            summary="first come, first served",
        ),
        Component(
            name="priority",
            options=PriorityOptions,
            factory=f"{RUNTIME}:Priority",
            offers=PolicyOffers(),
            summary="smallest priority number first, then first come",
        ),
        Component(
            name="longest_prefix",
            options=LongestPrefixOptions,
            factory=f"{RUNTIME}:LongestPrefix",
            offers=PolicyOffers(uses_prefix=True),
            summary="longest cached prefix first, with a limit on overtaking",
        ),
    ]
