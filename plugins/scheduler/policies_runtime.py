"""The built-in scheduling policies. Pure: the same arguments give the same answer, whatever came
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.policies import FcfsOptions, LongestPrefixOptions, PriorityOptions


def newest(sequences: Seq[Sequence]) -> Sequence:
    """The one that came last; of equals, the last in the list."""
    return max(enumerate(sequences), key=lambda item: (item[1].arrival, item[0]))[1]


class Fcfs:
    """The queue's own order: preempted sequences at its head, then by arrival. The newest gives
    way.
    """

    def __init__(self, options: FcfsOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        return list(waiting)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return newest(running)


class Priority:
    """By priority number, smallest first, then by the queue's order. The least important gives way,
    newest first.
    """

    def __init__(self, options: PriorityOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        return sorted(waiting, key=lambda sequence: sequence.priority)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        least = max(sequence.priority for sequence in running)
        return newest([sequence for sequence in running if sequence.priority == least])


class LongestPrefix:
    """Longest cached prefix first (SGLang's "lpm"), so that shared pages are used before they are
    evicted.

    Starvation guard: a preempted sequence, and one that came ``patience`` seconds before the newest
    in the queue, is never overtaken. Beyond ``window`` the queue's order stands, which bounds the
    cost of asking the cache.
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
