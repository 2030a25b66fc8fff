"""The runtime of the components of ``stall_plugin``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from torch import Tensor

from glowplug.core.protocols import Sampler
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from glowplug.plugins.speculative.nextn_runtime import NextN
from glowplug.plugins.speculative.none_runtime import NoSpeculation

HELD = 7  #: priority of the requests that a faulty component holds while it serves the others
BARREN = 13  #: ``max_tokens`` of such requests where no priority is available


class Stubborn:
    """A policy with the fault that ``fault`` names."""

    def __init__(self, options: Any, plan: Any, worker: Any) -> None:
        self._fault = options.fault

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Any]:
        if self._fault == "absent_victim":
            return list(waiting)
        if self._fault == "empty":
            return []
        kept = [one for one in waiting if one.admission.priority != HELD]
        faulty = {
            "withholds": [],
            "copies": [copy.copy(one) for one in waiting],
            "numbers": [one.id for one in waiting],
            "twice": [*kept, *waiting],
        }
        return [*faulty[self._fault], *kept]

    def victim(self, running: Seq[Sequence]) -> Any:
        return copy.copy(running[0])


class Sleepy(Continuous):
    """A scheduler that launches nothing in the first ``seconds`` of a sequence."""

    def next_batch(self) -> Batch | None:
        if any(self.clock() - one.arrival < self.options.seconds for one in self.queue.sequences()):  # type: ignore[attr-defined]
            return None
        return super().next_batch()


class Withhold:
    """Withdraws accepted tokens of marked rows once these have ``after`` tokens."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._had: dict[int, int] = {}

    def __call__(self, batch: Batch, accepted: Accepted) -> Accepted:
        for row in batch.left:
            self._had.pop(row, None)
        for sequence in batch.joined:
            if sequence.params.max_tokens == BARREN:
                self._had[sequence.row] = 0
        accepted.counts = accepted.counts.clone()
        for i, row in enumerate(batch.rows.tolist()):
            if row in self._had and batch.samples[i]:
                if self._had[row] >= self._after:
                    accepted.counts[i] = 0
                self._had[row] += int(accepted.counts[i])
        return accepted


class Barren(NoSpeculation):
    def __init__(self, options: Any, plan: Any, worker: Any) -> None:
        super().__init__(options, plan, worker)
        self._withhold = Withhold(options.after)

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        return self._withhold(batch, super().accept(logits, hidden, batch, sampler))


class BarrenNextN(NextN):
    def __init__(self, options: Any, plan: Any, worker: Any) -> None:
        super().__init__(options, plan, worker)
        self._withhold = Withhold(options.after)

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        return self._withhold(batch, super().accept(logits, hidden, batch, sampler))
