"""What a rank's memory goes to: measured while it starts, and the KV pool made of what is left.

On a device, steps of the largest admitted shapes run over a pool of a few pages first. What they
take is then known, kernels are compiled and libraries have their workspaces, so that the pool can
have all the rest but a reserve.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from glowplug.core.engine.runner import Runner
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.kv_layout import DTYPE_BYTES, KVLayout
from glowplug.core.layers.rope import Rope
from glowplug.core.plan.budget.graphs import driver_bytes, kept_bytes, pool_bytes
from glowplug.core.plan.budget.sizes import human
from glowplug.core.plan.budget.step import RESERVED
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Collectives, GraphRunner, Limits, Model, Worker
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.kv_cache_error import check_cache
from glowplug.core.startup.memory_gauge import Gauge, MemoryMeter, gauge_of
from glowplug.core.startup.page_fit import Left, compared, pages_that_fit
from glowplug.core.startup.warmup import (
    FEW_PAGES,
    most_captured,
    most_logits,
    most_passed,
    most_tokens,
    steps_between,
    warm_up,
)
from glowplug.core.step.batch import Batch
from glowplug.core.step.kv_pool import KVPool

RUNTIME = "cuda runtime"
#: of the largest step, what steps claim where segments grow: those of fewer tokens in turn leave
#: some of it cut up (V3 on an H200: 5% beyond, 144 MiB of them more than its share)
LOOSE = 1.1
FIXES = (
    "a smaller scheduler.chunk_size, fewer scheduler.max_running_requests, a smaller memory.fraction, "
    "more memory.reserve_bytes"
)


class RankMemory:
    """Meter and maker of one rank's memory.

    Attributes:
        measures: the rank's device can be measured; otherwise the plan's own number of pages
            stands.
        plan: the plan, with the number of pages that the rank really has.
    """

    def __init__(self, plan: EnginePlan, worker: Worker, gauge: Gauge | None = None) -> None:
        self.plan = plan
        self._device = worker.device
        self.meter = MemoryMeter(gauge or gauge_of(worker.device))
        self.gauge = self.meter.gauge
        self.measures = self.gauge.measures
        self._workspaces = 0
        self._of_graphs = 0  # bytes that the driver holds for graphs

    def mark_model(self, line: str, model: Model) -> None:
        """What building ``model`` took is ``line``'s, its rotary table apart."""
        self.meter.mark(line)
        rope = getattr(model, "rope", None)
        if isinstance(rope, Rope):
            self.meter.move(line, "rotary tables", rope.table.nbytes)

    # ---- the KV pool -----------------------------------------------------------------------------

    def fit(self, runner: Runner, parallel: ParallelStack, collectives: Collectives) -> Left:
        """Decide on the number of pages by measuring. GlowplugError when they are too few."""
        layout = runner.attention.kv_layout()
        with self.naming("kernels"):
            small = KVPool(layout, FEW_PAGES, self._device)
            self._reserve(small, runner.speculative)
            self.meter.mark(RUNTIME)
            self._reserve(small, runner.attention)
            self.meter.mark(
                RESERVED if any(line.name == RESERVED for line in self.plan.budget) else RUNTIME
            )
            self._reserve(small, runner.sampler)
            self.meter.mark("sampling state")
            left = self._measure(runner, parallel)
        states = sum(line.bytes for line in self.plan.budget if line.name == "page states")
        page_bytes = layout.page_bytes + states // self.plan.sizes.num_pages
        pages = pages_that_fit(self.plan, left, page_bytes, self.meter.lines)
        # NOTE: the fewest of any rank: schedulers that decide alike need pools alike.
        agreed = int(collectives.all_gather_numbers(np.array([pages], np.int64)).min())
        self.plan = replace(self.plan, sizes=replace(self.plan.sizes, num_pages=agreed))
        return left

    def check_cache(self, runner: Runner) -> str | None:
        """See ``cache_gate.check_cache``: over pools that are there before the real one."""
        again = [] if self.measures else [runner.sampler]

        def lend(layout: KVLayout, pages: int) -> None:
            self._reserve(
                KVPool(layout, pages, self._device), runner.attention, runner.speculative, *again
            )

        with self.naming("kv"):
            found = check_cache(runner, self.plan, lend)
            if found is not None:
                lend(runner.attention.kv_layout(), FEW_PAGES)
                self.gauge.settle()
                self.meter.mark(RUNTIME)
            return found

    def make_pool(self, runner: Runner) -> KVPool:
        with self.naming("kv"):
            pool = KVPool(runner.attention.kv_layout(), self.plan.sizes.num_pages, self._device)
            self.meter.mark("kv cache")
            self.plan = replace(self.plan, sizes=replace(self.plan.sizes, kv_bytes=pool.bytes))
            again = [] if self.measures else [runner.sampler]
            self._reserve(pool, runner.attention, runner.speculative, *again)
            self.meter.mark("page states")
        return pool

    def _reserve(self, pool: KVPool, *parts: Any) -> None:
        sizes = self.plan.sizes
        model = self.plan.facts.model
        limits = Limits(
            rows=sizes.max_running + 1,
            context=sizes.positions,
            num_pages=pool.num_pages,
            width=sizes.width,
            vocab=model.vocab_size,
            kv=pool.layers,
            hidden=model.hidden_size,
        )
        for part in parts:
            part.reserve(limits)

    def _measure(self, runner: Runner, parallel: ParallelStack) -> Left:
        """Run the largest steps: what they take and give back, and what they leave of the device."""
        meter = self.meter
        gauge = self.gauge
        gauge.settle()
        meter.mark(RUNTIME)
        warm_up(runner, self.plan, parallel.router())
        gauge.settle()
        meter.mark(RUNTIME)
        self._workspaces = meter.lines[RUNTIME]  # that libraries take from torch
        most_logits(runner, self.plan)
        gauge.settle()
        meter.mark("sampling state")  # it grows with what rows ask for, and stays
        steps = [self._peak(runner, line, run) for line, run in self._steps(runner)]
        graphs = self._graphs(runner)
        meter.lines[RUNTIME] += meter.outside
        free, total = gauge.device()
        step = int(max(steps) * LOOSE) if self.plan.growing_segments else max(steps)
        return Left(total=total, free=free, step=step, graphs=graphs)

    def _steps(self, runner: Runner) -> list[tuple[str, Callable[[], None]]]:
        """The largest steps by the line of the budget that they show."""
        return [
            ("activations", partial(most_tokens, runner, self.plan)),
            ("logits", partial(most_logits, runner, self.plan)),
        ]

    def _peak(self, runner: Runner, line: str, run: Callable[[], None]) -> int:
        """Measures ``line``; returns what the allocator claimed for it, which is more by
        fragmentation.

        NOTE: without graphs, whose memory is a line of its own; steps that no graph fits take
        theirs beside it.
        """
        with self.meter.peak(line):
            return self._claims(runner, run)

    def _claims(self, runner: Runner, run: Callable[[], None]) -> int:
        claimed = self.gauge.claimed()
        self.gauge.restart()
        with _eagerly(runner):
            run()
        self.gauge.settle()
        return max(0, self.gauge.most_claimed() - max(claimed, self.gauge.claimed()))

    def _graphs(self, runner: Runner) -> int:
        """What capturing will take: the pool that all graphs share, what stays beside it, and the
        driver's.

        NOTE: a captured step is for the longest context, as its kernels' splits are those of every
        replay.
        """
        shapes = runner.graphs.shapes(self.plan)
        counts = self.plan.sizes.pass_tokens
        if not shapes:
            return 0
        batch_sizes = [rows for _, rows, _ in shapes]
        pool = pool_bytes(
            self._peak(runner, "graphs", partial(most_captured, runner, self.plan, batch_sizes)),
            self._claims(runner, partial(most_passed, runner, self.plan)),
            self.plan.growing_segments,
        )
        model = self.plan.facts.model
        sizes = self.plan.sizes
        beside = driver_bytes(
            len(shapes), model.num_layers, len(counts), sizes.lookahead, len(sizes.extend_tokens)
        ) + kept_bytes(
            model,
            batch_sizes,
            counts,
            -(-sizes.positions // sizes.page_size),
            DTYPE_BYTES[self.plan.dtype],
            self.plan.growing_segments,
            sizes.extend_tokens,
        )
        self.meter.lines["graphs"] = pool + beside
        return pool + beside

    # ---- graphs and the self-test ----------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What graphs take: of torch's memory and of the driver's.

        NOTE: what their pool has from the device, since nothing else can use it, whether tensors
        live there or not.
        """
        with self.naming("capture"):
            if (
                self.measures
            ):  # what went out of use before is not to be counted against what graphs take
                gc.collect()
            outside = self.meter.outside
            with self.meter.taking("graphs"):
                yield
            self._of_graphs = max(0, self.meter.outside - outside)

    def test(self, runner: Runner, parallel: ParallelStack) -> None:
        """First steps over the real pool; on a device the largest ones too, so that no request's is
        the first.
        """
        with self.naming("self-test"):
            warm_up(runner, self.plan, parallel.router())
            if not self.measures:
                self.meter.mark("activations")
                return
            self.gauge.settle()
            for line, run in self._steps(runner):
                self._peak(runner, line, run)
            steps_between(runner, self.plan)
            self.gauge.settle()  # blocks as these steps needed them fit few of the requests'
            self.gauge.restart()

    # ---- words -----------------------------------------------------------------------------------

    @contextmanager
    def naming(self, phase: str) -> Iterator[None]:
        """Running out of memory becomes an error with names and numbers."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise GlowplugError(
                f"out of device memory in phase {phase}; measured so far: "
                f"{compared(self.plan, self.meter.lines)}. Fix: {FIXES} ({error})"
            ) from error

    def report(self) -> dict[str, dict[str, int | None]]:
        """Bytes by line: planned before loading, measured while starting, and ``served``, the same
        over the whole pool.

        ``step`` (on a device): the most that a step has taken since the rank was ready.
        """
        planned = {line.name: line.bytes for line in self.plan.budget}
        lines: dict[str, dict[str, int | None]] = {}
        for name in dict.fromkeys([*planned, *self.meter.lines]):
            lines[name] = {"planned": planned.get(name), "measured": self.meter.lines.get(name)}
            if name in self.meter.again:
                lines[name]["served"] = self.meter.again[name]
        if self.measures:
            lines[RUNTIME]["served"] = self.meter.outside + self._workspaces - self._of_graphs
            lines["step"] = {
                "planned": None,
                "measured": self._most_of_steps(),
                "served": self._since_ready(),
            }
        return lines

    def _most_of_steps(self) -> int:
        return self.meter.lines.get("activations", 0) + self.meter.lines.get("logits", 0)

    def _since_ready(self) -> int:
        return max(0, self.gauge.most() - self.gauge.held())

    def graphs(self) -> str:
        """For the log: what graphs really took."""
        took = self.meter.again.get("graphs", self.meter.lines.get("graphs", 0))
        if not took:
            return "graphs take no memory"
        return f"graphs take {human(took)}, {human(self._of_graphs)} of it the driver's"

    def summary(self) -> str:
        """One line for the log: what each line of the budget came to, and how far the plan was off."""
        planned = {line.name: line.bytes for line in self.plan.budget}
        parts = [
            f"{name} {human(size)}"
            + (f" ({size / planned[name] - 1:+.0%})" if planned.get(name) else "")
            for name, size in self.meter.lines.items()
            if size
        ]
        return "memory, against the plan: " + ", ".join(parts)


class _NoGraphs:
    """In place of a graph runner while no step is to be replayed."""

    def slot_for(self, batch: Batch) -> None:
        return None

    def pass_for(self, batch: Batch) -> None:
        return None


@contextmanager
def _eagerly(runner: Runner) -> Iterator[None]:
    kept = runner.graphs
    runner.graphs = cast(GraphRunner, _NoGraphs())
    try:
        yield
    finally:
        runner.graphs = kept
