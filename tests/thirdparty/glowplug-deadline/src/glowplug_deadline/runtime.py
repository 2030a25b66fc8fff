"""The runtime of the scheduling policy "deadline"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from glowplug.core.api import EnginePlan, RequestError
from glowplug.core.protocols import Worker
from glowplug.core.step.request import Sequence
from glowplug_deadline.plugin import DeadlineOptions, RequestFields


def due(sequence: Sequence) -> float:
    """Return the time at which the answer of a sequence is needed."""
    fields = RequestFields(**(sequence.params.ext or {}))
    return sequence.arrival + fields.deadline


class Deadline:
    """Earliest deadline first; the latest deadline is preempted."""

    def __init__(self, options: DeadlineOptions, plan: EnginePlan, worker: Worker) -> None:
        self._lead = options.lead
        self._clock = worker.clock

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        return sorted(waiting, key=due)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return max(enumerate(running), key=lambda item: (due(item[1]), item[0]))[1]

    def hold(self, sequence: Sequence) -> float:
        fields = RequestFields(**(sequence.params.ext or {}))
        return sequence.arrival + fields.start_in if fields.start_in else 0.0

    def reject(self, waiting: Seq[Sequence]) -> Mapping[int, RequestError]:
        now = self._clock()
        return {
            one.id: RequestError("the deadline has passed", code="deadline")
            for one in waiting
            if due(one) < now
        }

    def preempts(self, first: Sequence, running: Seq[Sequence]) -> Sequence | None:
        latest = self.victim(running)
        return latest if due(latest) - due(first) > self._lead else None
