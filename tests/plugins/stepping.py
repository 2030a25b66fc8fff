"""A plugin that records the size of the drafts and the gains of each committed step."""

from __future__ import annotations

from typing import NamedTuple

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.step.batch import Batch
from glowplug.core.step.messages import StepOutput


class Step(NamedTuple):
    """A committed step: the size of its drafts, and the tokens gained by each sequence."""

    shape: DraftShape | None
    gained: dict[int, int]


steps: list[Step] = []


class Observer:
    def step(self, batch: Batch, output: StepOutput) -> None:
        counts = output.counts or [1] * len(output.ids)
        steps.append(Step(batch.draft_shape, dict(zip(output.ids, counts, strict=True))))


def take() -> list[Step]:
    """Return the records since the last call."""
    noted = list(steps)
    steps.clear()
    return noted


@hookimpl
def step_observers() -> list[Observer]:
    return [Observer()]
