"""Runtime of the graph runner "replaying"."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from glowplug.core.batch import Batch
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.graphs.cuda_graph_runtime import CudaGraph
from glowplug.plugins.graphs.cuda_recorder import map_tensors
from tests.replaying import ReplayingOptions

NEWEST: list[Replaying] = []  #: of this process; what a test looks into


class Functions:
    """A ``Recorder``. Results lie where they lay at the capture, and as in a shared pool a replay spoils those of every
    other slot's pieces."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = [[]]  #: results of each slot's pieces, the one being captured last
        self.replays = 0

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = map_tensors(torch.clone, work())
        group = self.groups[-1]
        group.append(results)

        def replay() -> None:
            self.replays += 1
            for other in self.groups:
                if other is not group:
                    _spoil(other)
            for kept, fresh in zip(_tensors(results), _tensors(map_tensors(torch.clone, work())), strict=True):
                kept.copy_(fresh)

        return replay, results

    def loosen(self, results: Any) -> Any:
        if self.groups[-1]:
            self.groups.append([])
        return results


def _spoil(results: list[Any]) -> None:
    for tensor in _tensors(results):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1 if tensor.dtype is torch.bool else 7)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


class Replaying(CudaGraph):
    """Counts what it replays; breaks where it is told to."""

    def __init__(self, options: ReplayingOptions, plan: EnginePlan, worker: Worker) -> None:
        self.functions = Functions()
        super().__init__(options, plan, worker, self.functions)
        self.breaks = options.breaks
        self.filled: list[tuple[int, int]] = []  #: live rows and slot's rows of every step
        NEWEST[:] = [self]

    def capture(self, steps: Any, report: Callable[[int, int], None]) -> None:
        # the code of a device of its own, whose lengths the host does not know
        steps._on_host = steps.speculative._on_host = False
        super().capture(steps, report)
        self.captured = self.functions.replays

    def _capture_one(self, steps: Any, slot: Any) -> None:
        record = slot.recorder.record

        def broken(work: Callable[[], Any]) -> Any:
            name = next(reversed(slot._parts), "")
            if self.breaks == f"{slot.shape.mode} {slot.shape.rows} {name}":
                raise RuntimeError("made to fail")
            return record(work)

        slot.recorder.record = broken
        try:
            super()._capture_one(steps, slot)
        finally:
            self.functions.record = record  # type: ignore[method-assign]

    def fill(self, slot: Any, batch: Batch) -> Batch:
        self.filled.append((batch.num_rows, slot.shape.rows))
        return super().fill(slot, batch)
