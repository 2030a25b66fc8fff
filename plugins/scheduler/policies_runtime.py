"""Runtimes of the built-in scheduling policies.

The policies have no state: the same arguments always give the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.policies import FcfsOptions, LongestPrefixOptions, PriorityOptions


def newest(sequences: Seq[Sequence]) -> Sequence:
    """Return the sequence that arrived last; among equals, the last in the list."""
    return max(enumerate(sequences), key=lambda item: (item[1].arrival, item[0]))[1]


class Fcfs:
    """Policy that keeps the queue's order: preempted sequences first, then by arrival.

    The newest sequence is preempted.
    """

    def __init__(self, options: FcfsOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        return list(waiting)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return newest(running)


class Priority:
    """Policy that orders by priority number, smallest first, then by the queue's order.

    The least important sequence is preempted; among equals, the newest.
    """

    def __init__(self, options: PriorityOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        return sorted(waiting, key=lambda sequence: sequence.admission.priority)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        least = max(sequence.admission.priority for sequence in running)
        return newest([sequence for sequence in running if sequence.admission.priority == least])


class LongestPrefix:
    """Policy that admits the longest cached prefix first (SGLang's "lpm").

    Shared pages are thus used before they are evicted. Against starvation, no sequence overtakes
    a preempted one, or one that arrived more than ``patience`` seconds before the newest in the
    queue. Only the first ``window`` sequences are reordered, which bounds the cost of cache
    look-ups.
    """

    def __init__(self, options: LongestPrefixOptions, plan: EnginePlan, worker: Worker) -> None:
        self.window = options.window
        self.patience = options.patience

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        if not waiting:
            return []
        last = max(sequence.arrival for sequence in waiting)
        waited: list[Sequence] = []
        patient: list[Sequence] = []
        for sequence in waiting:
            is_due = sequence.preemptions > 0 or last - sequence.arrival > self.patience
            (waited if is_due else patient).append(sequence)
        head = sorted(patient[: self.window], key=lambda sequence: -cached[sequence.id])
        return waited + head + patient[self.window :]

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return newest(running)
