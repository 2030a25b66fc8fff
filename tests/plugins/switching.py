"""A plugin for tests: the scheduler "switching", whose steps have drafts of random sizes.

It is the scheduler "continuous" with another choice of ``Batch.draft_shape``. The size and the
gain of every step of each sequence are recorded.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import SchedulerOffers
from glowplug.core.step.batch import Batch
from glowplug.core.step.messages import StepOutput
from glowplug.plugins.scheduler.continuous import ContinuousOptions

#: sequence id -> (tokens that a row computed, tokens gained) of each committed decode step
STEPS: dict[int, list[tuple[int, int]]] = {}


class SwitchingOptions(ContinuousOptions):
    use: Literal["switching"] = "switching"  # type: ignore[assignment]
    seed: int = 0
    #: steps with drafts of each size in turn, by number of the size, repeated; (): random
    pattern: tuple[int, ...] = Field(())


class Observer:
    def step(self, batch: Batch, output: StepOutput) -> None:
        width = batch.draft_shape.tokens if batch.draft_shape is not None else 0
        for id, count in zip(output.ids, output.counts or [1] * len(output.ids), strict=True):
            STEPS.setdefault(id, []).append((width, count))


def take() -> list[list[tuple[int, int]]]:
    """Return the records since the last call, by order of submission."""
    noted = [STEPS[id] for id in sorted(STEPS)]
    STEPS.clear()
    return noted


@hookimpl
def step_observers() -> list[Observer]:
    return [Observer()]


@hookimpl
def register_schedulers() -> list[Component]:
    return [
        Component(
            name="switching",
            options=SwitchingOptions,
            factory="tests.plugins.switching_runtime:Switching",
            offers=SchedulerOffers(adapts=True),
            summary="drafts of random sizes",
        )
    ]
