"""The runtime of the graph runner "replaying"."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch
from glowplug.core.step.graph_pieces import ExtendWork
from glowplug.plugins.graphs.capture.draft_extend_graph import Extends
from glowplug.plugins.graphs.capture.recorder import map_tensors
from glowplug.plugins.graphs.cuda_graph_runtime import CudaGraph
from tests.plugins.replaying import ReplayingOptions

NEWEST: list[Replaying] = []  #: runners of this process, for tests to inspect


class Functions:
    """A ``Recorder``. Results lie where they lay at the capture, and as in a shared pool a replay
    spoils those of every other graph's pieces."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = [
            []
        ]  #: results of each graph's pieces, the one being captured last
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
            for kept, fresh in zip(
                _tensors(results), _tensors(map_tensors(torch.clone, work())), strict=True
            ):
                kept.copy_(fresh)

        return replay, results

    def loosen(self, results: Any) -> Any:
        if self.groups[-1]:
            self.groups.append([])
        return results


def _spoil(results: list[Any]) -> None:
    for tensor in _tensors(results):
        tensor.fill_(
            float("nan") if tensor.is_floating_point() else 1 if tensor.dtype is torch.bool else 7
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


class Threads:
    """A ``Tape``. A replay runs ``work`` anew, in a thread that stops at each cut, as a graph ends
    there.

    What it leaves behind lies where it lay at the capture. As in a shared pool a piece spoils
    everything that another pass, another graph or an earlier piece has left.
    """

    def __init__(self, functions: Functions, breaks: str | None) -> None:
        self._functions, self._breaks = functions, breaks
        self._pass: _Pass | None = None  # the pass being captured, or the one whose thread runs
        self.replays = 0

    def record(self, work: Callable[[], Any]) -> tuple[list[Callable[[], None]], Any]:
        made = self._pass = _Pass()
        made.results = map_tensors(torch.clone, work())
        made.captured = True
        self._functions.groups.insert(0, made.left)
        made.left.append([made.results])
        return [
            partial(self._replay, made, number, work) for number in range(len(made.left))
        ], made.results

    def split(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        made = self._pass
        assert made is not None
        if self._breaks == f"pass {len(rows[0])}":
            raise RuntimeError("made to fail")
        if not made.captured:
            made.left.append([part.clone() for part in rows])
            return tuple(made.left[-1])
        made.leave(rows)
        return None

    def _replay(self, made: _Pass, number: int, work: Callable[[], Any]) -> None:
        self.replays += 1
        if number == 0:
            self._pass = made
            made.begin(work)
        assert self._pass is made, "pieces of one pass are replayed one after another"
        made.run(number)
        for group in self._functions.groups:
            for at, left in enumerate(group):
                if group is not made.left or at != number:
                    _spoil(left)


class _Pass:
    """One pass; ``left`` holds the results of each piece."""

    def __init__(self) -> None:
        self.left: list[list[Any]] = []
        self.results: Any = None
        self.captured = False

    def begin(self, work: Callable[[], Any]) -> None:
        self._at = -1
        self._error: BaseException | None = None
        self._go, self._gone = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._work, args=(work,), daemon=True).start()

    def _work(self, work: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            with torch.inference_mode():
                self._keep([work()])
        except BaseException as error:
            self._error = error
        self._gone.release()

    def leave(self, rows: tuple[Tensor, ...]) -> None:
        self._keep(list(rows))
        self._gone.release()
        self._go.acquire()

    def _keep(self, fresh: list[Any]) -> None:
        self._at += 1
        for kept, value in zip(_tensors(self.left[self._at]), _tensors(fresh), strict=True):
            kept.copy_(value)

    def run(self, number: int) -> None:
        self._go.release()
        self._gone.acquire()
        if self._error is not None:
            raise self._error
        assert self._at == number


class _Extends(Extends):
    """A draft-extend runner that counts its calls."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads
        self.called: list[tuple[int, bool]] = []  #: tokens, and whether they were replayed

    def __call__(self, ids: Tensor, *rest: Tensor) -> None:
        begun = self._threads.replays
        super().__call__(ids, *rest)
        self.called.append((len(ids), self._threads.replays > begun))


def _breaking(work: ExtendWork, tokens: int) -> ExtendWork:
    def extend(ids: Tensor, *rest: Tensor) -> None:
        if len(ids) == tokens:
            raise RuntimeError("made to fail")
        work.extend(ids, *rest)

    return dataclasses.replace(work, extend=extend)


def _plans(first_key: int) -> bool:
    """Return True, as attention does that plans on the device."""
    return True


class Replaying(CudaGraph):
    """A graph runner that counts replays and fails at a given capture."""

    def __init__(self, options: ReplayingOptions, plan: EnginePlan, worker: Worker) -> None:
        self.functions = Functions()
        self.one_piece = options.one_piece
        self.breaks = options.breaks if worker.rank == options.breaks_rank else None
        self.threads = Threads(self.functions, self.breaks)
        super().__init__(options, plan, worker, self.functions, self.threads)
        self.filled: list[tuple[int, int]] = []  #: live rows and graph's rows of every step
        self.drafts: list[DraftShape | None] = []  #: size of the drafts of each of these steps
        self.begun: list[int] = []  #: replays before each of these steps
        self.passed: list[tuple[int, int]] = []  #: a step's tokens and its pass's
        self._extends = self.extends = _Extends(self.threads)
        NEWEST[:] = [self]

    def capture(self, steps: Any, report: Callable[[int, int], None]) -> None:
        # the code for a device of its own, whose lengths are not available on the host
        steps._on_host = steps.speculative._on_host = False
        if self.one_piece:  # a replayed function plans anew, so that plain torch may be in it
            for attention in (steps.attention, getattr(steps.speculative, "_attention", None)):
                if attention is not None:
                    attention.plans_on_device = _plans
        if self.breaks is not None and self.breaks.startswith("extend "):
            steps.draft_extend.work = _breaking(
                steps.draft_extend.work, int(self.breaks.split()[1])
            )
        super().capture(steps, report)
        self.captured = self.functions.replays

    def _capture_one(self, steps: Any, graph: Any) -> None:
        record = graph.recorder.record

        def broken(work: Callable[[], Any]) -> Any:
            name = next(reversed(graph._keys), "")
            if self.breaks == f"{graph.shape.mode} {graph.shape.rows} {name}":
                raise RuntimeError("made to fail")
            return record(work)

        graph.recorder.record = broken
        try:
            super()._capture_one(steps, graph)
        finally:
            self.functions.record = record  # type: ignore[method-assign]

    def pass_for(self, batch: Batch) -> Any:
        found = super().pass_for(batch)
        if found is not None:
            self.passed.append((batch.num_tokens, found.tokens))
        return found

    def fill(self, graph: Any, batch: Batch) -> Batch:
        self.filled.append((batch.num_rows, graph.shape.rows))
        self.drafts.append(graph.shape.drafts)
        self.begun.append(self.functions.replays)
        return super().fill(graph, batch)
