"""The runtime of the scheduler "switching"."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import DraftPolicy, Worker
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from tests.plugins.switching import SwitchingOptions
from tests.support.random_drafts import RandomDrafts


class InTurn(RandomDrafts):
    """A policy that chooses the sizes of a pattern in turn."""

    def __init__(self, shapes: tuple[DraftShape, ...], pattern: tuple[int, ...]) -> None:
        super().__init__(shapes)
        self._pattern = cycle(pattern)

    def choose(self, rows: Any, most: int) -> DraftShape:
        return self.shapes[next(self._pattern)]


class Switching(Continuous):
    def __init__(self, options: SwitchingOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        shapes = plan.sizes.draft_shapes
        # groups of ranks have different requests, so they choose differently
        seed = options.seed + worker.coordinates.get("dp", 0)
        self.drafts = (
            InTurn(shapes, options.pattern) if options.pattern else RandomDrafts(shapes, seed)
        )

    def adapt(self, policy: DraftPolicy) -> None:
        super().adapt(self.drafts)
