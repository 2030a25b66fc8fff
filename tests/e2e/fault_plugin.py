"""A plugin that makes one rank fail: a weight source, a sampler and a graph runner with one fault
each, set by their options.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GraphOffers, SamplerOffers, WeightOffers
from glowplug.core.plugin.options import SamplingOptions, WeightOptions
from tests.plugins.replaying import ReplayingOptions

Fault = Literal["kill", "stop", "error", "memory", "hang", "none"]


class FaultyWeightOptions(WeightOptions):
    use: Literal["faulty"] = "faulty"
    seed: int | None = None
    fault: Fault = "none"
    rank: int = 0
    at: int = 5
    note: str = ""
    pause: float = 0.0  #: seconds that the rank takes for each tensor


class FaultySamplingOptions(SamplingOptions):
    use: Literal["faulty"] = "faulty"
    fault: Fault = "none"
    rank: int = 0
    at: int = 1
    note: str = ""
    #: method whose calls are counted
    method: Literal["sample", "reserve"] = "sample"


class FaultyGraphOptions(ReplayingOptions):
    use: Literal["faulty"] = "faulty"  # type: ignore[assignment]
    fault: Fault = "none"
    rank: int = 0
    at: int = 1
    note: str = ""
    #: pieces that are counted: those captured, or those replayed
    pieces: Literal["captured", "replayed"] = "captured"


@hookimpl
def register_weight_sources() -> list[Component]:
    return [
        Component(
            "faulty",
            FaultyWeightOptions,
            "tests.e2e.fault_runtime:FaultySource",
            WeightOffers(formats=frozenset({"synthetic"})),
            summary="fails while it loads",
        )
    ]


@hookimpl
def register_samplers() -> list[Component]:
    return [
        Component(
            "faulty",
            FaultySamplingOptions,
            "tests.e2e.fault_runtime:FaultySampler",
            SamplerOffers(),
            summary="fails when it samples",
        )
    ]


@hookimpl
def register_graph_runners() -> list[Component]:
    return [
        Component(
            "faulty",
            FaultyGraphOptions,
            "tests.e2e.fault_runtime:FaultyGraphs",
            GraphOffers(),
            summary="fails when it captures or replays",
        )
    ]
