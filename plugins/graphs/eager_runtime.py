"""Runtime of the graph runner "eager"."""

from __future__ import annotations

from collections.abc import Callable

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.graphs.eager import EagerOptions


class Eager:
    """The ``protocols.GraphRunner`` that captures nothing.

    It has no graph for any batch, so ``fill`` is never reached.
    """

    def __init__(self, options: EagerOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        return []

    def capture(self, steps: object, report: Callable[[int, int], None]) -> None:
        pass

    def graph_for(self, batch: Batch) -> object | None:
        return None

    def fill(self, graph: object, batch: Batch) -> Batch:
        raise AssertionError("the eager graph runner captured nothing, so there is nothing to fill")

    def pass_for(self, batch: Batch) -> None:
        return None

    def close(self) -> None:
        pass
