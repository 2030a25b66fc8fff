"""Measurement of a rank's memory during start-up, and construction of its KV pool.

On a device, steps of the largest admitted shapes run first, over a pool of a few pages. Afterwards
their memory is known, kernels are compiled and libraries have their workspaces. The KV pool can
then have the rest of the memory, except for a reserve.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from glowplug.core.engine.runner import Runner
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.layers.rope import Rope
from glowplug.core.plan.budget.graphs import beside_pool, pool_bytes
from glowplug.core.plan.budget.pages import DRAFT_CACHE, PAGE_LINES
from glowplug.core.plan.budget.step import DRAFT_STATE, RESERVED, RUNTIME_LINE
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Collectives, GraphRunner, Limits, Model, Worker
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.first_use.steps_between import steps_between
from glowplug.core.startup.kv_cache_error import check_cache
from glowplug.core.startup.memory_gauge import Gauge, MemoryMeter, gauge_of
from glowplug.core.startup.page_fit import (
    MeasuredMemory,
    compared,
    differences,
    pages_that_fit,
    planned_as_measured,
)
from glowplug.core.startup.warmup import (
    FEW_PAGES,
    most_captured,
    most_logits,
    most_passed,
    most_tokens,
    warm_up,
)
from glowplug.core.step.batch import Batch
from glowplug.core.step.kv_pool import KVPool

#: memory that steps claim with expandable segments, as a multiple of the largest step's: later
#: steps of fewer tokens fragment it (V3 on an H200: 5% more, 144 MiB more than its share)
FRAGMENTATION_FACTOR = 1.1
#: fixes for an out-of-memory error during start-up
OUT_OF_MEMORY_FIXES = (
    "a smaller scheduler.chunk_size, fewer scheduler.max_running_requests, "
    "a smaller memory.fraction or memory.static_fraction, more memory.reserve_bytes"
)


class RankMemory:
    """Measurements of one rank's memory, and construction of its KV pool.

    Attributes:
        plan: the plan, with the number of pages that the rank really has.
        meter: measured bytes by budget line.
        gauge: the reader of memory counts.
        kv: the KV pool, by layer and entry; () before ``make_pool``.
        measures: True: the rank's device can be measured. False: the pool has the plan's number of
            pages.
    """

    def __init__(self, plan: EnginePlan, worker: Worker, gauge: Gauge | None = None) -> None:
        self.plan = plan
        self._device = worker.device
        self.meter = MemoryMeter(gauge or gauge_of(worker.device))
        self.gauge = self.meter.gauge
        self.kv: tuple[Mapping[str, torch.Tensor], ...] = ()
        self.measures = self.gauge.measures
        self._workspace_bytes = 0
        self._driver_graph_bytes = 0  # the CUDA driver's memory for graphs

    def mark_model(self, line: str, model: Model) -> None:
        """Add the memory gained by building ``model`` to ``line``, without its rotary table."""
        self.meter.mark(line)
        rope = getattr(model, "rope", None)
        if isinstance(rope, Rope):
            self.meter.move(line, "rotary tables", rope.table.nbytes)

    # ---- the KV pool -----------------------------------------------------------------------------

    def fit(
        self, runner: Runner, parallel: ParallelStack, collectives: Collectives
    ) -> MeasuredMemory:
        """Decide the number of pages by measuring the largest steps.

        Returns:
            The measured bytes of the device.

        Raises:
            GlowplugError: the pages are too few for the plan.
        """
        layout = runner.attention.kv_layout()
        with self.naming("kernels"):
            self._reserve_buffers(runner, KVPool(layout, FEW_PAGES, self._device))
            measured = self._measure(runner, parallel)
        sizes = self.plan.sizes
        beside = sum(line.bytes for line in self.plan.budget if line.name in PAGE_LINES)
        page_bytes = layout.page_bytes + beside // sizes.num_pages
        pages = pages_that_fit(self.plan, measured, page_bytes, self.meter.lines)
        # NOTE: the minimum over ranks, because schedulers decide alike only with equal pools
        agreed = int(collectives.all_gather_numbers(np.array([pages], np.int64)).min())
        self.plan = replace(self.plan, sizes=replace(sizes, num_pages=agreed))
        return measured

    def _reserve_buffers(self, runner: Runner, pool: KVPool) -> None:
        """Have the runner's parts allocate their buffers, and measure these by budget line."""
        planned = {line.name for line in self.plan.budget}
        for part, line in ((runner.speculative, DRAFT_STATE), (runner.attention, RESERVED)):
            self._reserve(pool, part)
            self.meter.mark(line if line in planned else RUNTIME_LINE)
        self._reserve(pool, runner.sampler)
        self.meter.mark("sampling state")

    def check_cache(self, runner: Runner) -> str | None:
        """Measure the error of an 8-bit KV cache over small pools, before the real pool exists.

        See ``kv_cache_error.check_cache``.
        """
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
                self.meter.mark(RUNTIME_LINE)
            return found

    def make_pool(self, runner: Runner) -> KVPool:
        """Make the KV pool of the plan's number of pages and give it to the runner's parts."""
        with self.naming("kv"):
            pool = KVPool(runner.attention.kv_layout(), self.plan.sizes.num_pages, self._device)
            self.meter.mark("kv cache")
            self.kv = pool.layers
            self.plan = replace(self.plan, sizes=replace(self.plan.sizes, kv_bytes=pool.bytes))
            again = [] if self.measures else [runner.sampler]
            self._reserve(pool, runner.attention, runner.speculative, *again)
            planned = {line.name for line in self.plan.budget}
            self.meter.mark(DRAFT_CACHE if DRAFT_CACHE in planned else "page states")
        return pool

    def _reserve(self, pool: KVPool, *parts: Any) -> None:
        """Call ``reserve`` of ``parts`` with the limits of ``pool``."""
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

    def _measure(self, runner: Runner, parallel: ParallelStack) -> MeasuredMemory:
        """Run the largest steps and measure their memory and the memory left on the device."""
        meter = self.meter
        gauge = self.gauge
        gauge.settle()
        meter.mark(RUNTIME_LINE)
        warm_up(runner, self.plan, parallel.router())
        gauge.settle()
        meter.mark(RUNTIME_LINE)
        self._workspace_bytes = meter.lines[RUNTIME_LINE]  # libraries' workspaces in torch's memory
        most_logits(runner, self.plan)
        gauge.settle()
        meter.mark("sampling state")  # grows with the rows' sampling features, is never released
        steps = [self._peak(runner, line, run) for line, run in self._steps(runner)]
        graphs = self._graphs(runner)
        meter.lines[RUNTIME_LINE] += meter.outside
        free, total = gauge.device()
        step = (
            int(max(steps) * FRAGMENTATION_FACTOR) if self.plan.expandable_segments else max(steps)
        )
        return MeasuredMemory(total=total, free=free, step=step, graphs=graphs)

    def _steps(self, runner: Runner) -> list[tuple[str, Callable[[], None]]]:
        """Return each budget line to measure, with the function that runs its largest steps."""
        return [
            ("activations", partial(most_tokens, runner, self.plan)),
            ("logits", partial(most_logits, runner, self.plan)),
        ]

    def _peak(self, runner: Runner, line: str, run: Callable[[], None]) -> int:
        """Measure ``line`` as the peak of held bytes while ``run`` runs.

        NOTE: steps run without graphs here. The graphs' memory has its own budget line, because
        steps that fit no graph need their memory in addition.

        Returns:
            The peak of claimed bytes, which exceeds that of held bytes by fragmentation.
        """
        with self.meter.peak(line):
            return self._claims(runner, run)

    def _claims(self, runner: Runner, run: Callable[[], None]) -> int:
        """Call ``run`` and return the bytes that it claims at its peak and releases.

        Bytes claimed before or afterwards do not count.
        """
        claimed = self.gauge.claimed()
        self.gauge.restart()
        with _eagerly(runner):
            run()
        self.gauge.settle()
        return max(0, self.gauge.most_claimed() - max(claimed, self.gauge.claimed()))

    def _graphs(self, runner: Runner) -> int:
        """Measure and return the bytes that capturing will take.

        These are the pool that all graphs share, the tensors kept beside it, and the driver's
        memory.

        NOTE: steps are captured at the longest context, because every replay uses the number of KV
        splits of the captured kernels.
        """
        shapes = runner.graphs.shapes(self.plan)
        if not shapes:
            return 0
        batch_sizes = [rows for _, rows, _ in shapes]
        pool = pool_bytes(
            self._peak(runner, "graphs", partial(most_captured, runner, self.plan, batch_sizes)),
            self._claims(runner, partial(most_passed, runner, self.plan)),
            self.plan.expandable_segments,
        )
        beside = beside_pool(self.plan, batch_sizes)
        self.meter.lines["graphs"] = pool + beside
        return pool + beside

    # ---- graphs and the self-test ----------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Measure the memory that graphs take from torch and from the driver.

        NOTE: all memory that the graph pool has taken counts, since nothing else can use it.
        """
        with self.naming("capture"):
            if self.measures:
                gc.collect()  # garbage freed during capture would be counted against the graphs
            outside = self.meter.outside
            with self.meter.taking("graphs"):
                yield
            self._driver_graph_bytes = max(0, self.meter.outside - outside)

    def test(self, runner: Runner, parallel: ParallelStack) -> None:
        """Run the self-test over the real pool.

        On a device, the largest steps and a grammar's mask run too, for their first-use costs.
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
            if runner.grammars.masks is not None:
                runner.grammars.masks.warm_up()
            self.gauge.settle()  # the blocks of these steps fit few of the requests' tensors
            self.gauge.restart()

    # ---- messages --------------------------------------------------------------------------------

    @contextmanager
    def naming(self, phase: str) -> Iterator[None]:
        """Turn an out-of-memory error in the context into a GlowplugError.

        The message names ``phase`` and the bytes measured so far.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise GlowplugError(
                f"out of device memory in phase {phase}; measured so far: "
                f"{compared(self.plan, self.meter.lines)}. Fix: {OUT_OF_MEMORY_FIXES} ({error})"
            ) from error

    def report(self) -> dict[str, dict[str, int | None]]:
        """Return the bytes of each budget line and, on a device, those of a step.

        Returns:
            For each line ``planned`` (see ``planned_as_measured``) and ``measured`` (before the KV
            pool was made); some lines also have ``served`` (measured with the whole pool
            allocated). On a device the key ``step`` is added, whose ``served`` is the peak since
            the rank was ready.
        """
        planned = planned_as_measured(self.plan)
        lines: dict[str, dict[str, int | None]] = {}
        for name in dict.fromkeys([*planned, *self.meter.lines]):
            lines[name] = {"planned": planned.get(name), "measured": self.meter.lines.get(name)}
            if name in self.meter.again:
                lines[name]["served"] = self.meter.again[name]
        if self.measures:
            lines[RUNTIME_LINE]["served"] = (
                self.meter.outside + self._workspace_bytes - self._driver_graph_bytes
            )
            lines["step"] = {
                "planned": None,
                "measured": self._measured_step_bytes(),
                "served": self._served_step_bytes(),
            }
        return lines

    def _measured_step_bytes(self) -> int:
        """Return the bytes of the largest step, measured while starting."""
        return self.meter.lines.get("activations", 0) + self.meter.lines.get("logits", 0)

    def _served_step_bytes(self) -> int:
        """Return the most bytes that a step has taken since the rank was ready."""
        return max(0, self.gauge.most() - self.gauge.held())

    def graphs(self) -> str:
        """Return a remark for the log on the memory that graphs really took."""
        took = self.meter.again.get("graphs", self.meter.lines.get("graphs", 0))
        if not took:
            return "graphs take no memory"
        return (
            f"graphs take {human(took)}, of which {human(self._driver_graph_bytes)} in the driver"
        )

    def summary(self) -> str:
        """Return one log line: measured bytes by budget line, and their difference to the plan."""
        found = differences(self.plan, self.meter.lines)
        return f"memory, measured (difference to the plan): {found}"


class _NoGraphs:
    """A graph runner without graphs, which replaces the runner's own while steps run eagerly."""

    def graph_for(self, batch: Batch) -> None:
        """Return None: no step is replayed."""
        return None

    def pass_for(self, batch: Batch) -> None:
        """Return None: no pass is replayed."""
        return None


@contextmanager
def _eagerly(runner: Runner) -> Iterator[None]:
    """Run all steps within the context without graphs."""
    kept = runner.graphs
    runner.graphs = cast(GraphRunner, _NoGraphs())
    try:
        yield
    finally:
        runner.graphs = kept
