"""A plugin that records the number of tokens that each sequence gained in each of its steps."""

from __future__ import annotations

from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.step.batch import Batch
from glowplug.core.step.messages import StepOutput

gained: dict[int, list[int]] = {}  #: sequence id -> tokens of each committed step


class Observer:
    def step(self, batch: Batch, output: StepOutput) -> None:
        for id, count in zip(output.ids, output.counts or [1] * len(output.ids), strict=True):
            gained.setdefault(id, []).append(count)


def take() -> list[list[int]]:
    """Return the records since the last call, by order of submission."""
    noted = [gained[id] for id in sorted(gained)]
    gained.clear()
    return noted


@hookimpl
def step_observers() -> list[Observer]:
    return [Observer()]
