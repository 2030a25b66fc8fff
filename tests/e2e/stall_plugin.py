"""A plugin of components that break their contract without an exception, so that requests would
wait for ever.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import PolicyOffers, SchedulerOffers, SpeculativeOffers
from glowplug.core.plugin.options import PolicyOptions
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.speculative.nextn import NextNOptions
from glowplug.plugins.speculative.none import NoSpeculationOptions

RUNTIME = "tests.e2e.stall_runtime"


class StubbornOptions(PolicyOptions):
    use: Literal["stubborn"] = "stubborn"
    fault: Literal["empty", "withholds", "copies", "numbers", "twice", "absent_victim"] = "empty"


class SleepyOptions(ContinuousOptions):
    use: Literal["sleepy"] = "sleepy"  # type: ignore[assignment]
    seconds: float = 1e9


class BarrenOptions(NoSpeculationOptions):
    use: Literal["barren"] = "barren"  # type: ignore[assignment]
    after: int = 0


class BarrenNextNOptions(NextNOptions):
    use: Literal["barren_nextn"] = "barren_nextn"  # type: ignore[assignment]
    after: int = 0


@hookimpl
def register_scheduling_policies() -> list[Component]:
    return [
        Component(
            "stubborn",
            StubbornOptions,
            f"{RUNTIME}:Stubborn",
            PolicyOffers(),
            summary="orders wrongly",
        )
    ]


@hookimpl
def register_schedulers() -> list[Component]:
    return [
        Component(
            "sleepy",
            SleepyOptions,
            f"{RUNTIME}:Sleepy",
            SchedulerOffers(),
            summary="launches nothing",
        )
    ]


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            "barren",
            BarrenOptions,
            f"{RUNTIME}:Barren",
            SpeculativeOffers(),
            summary="accepts nothing",
        ),
        Component(
            "barren_nextn",
            BarrenNextNOptions,
            f"{RUNTIME}:BarrenNextN",
            SpeculativeOffers(drafts=True, nextn_layer=True, first_key=True),
            summary="accepts nothing",
        ),
    ]
