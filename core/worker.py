"""Builds one rank from a plan: components, model, weights, KV pool, loop; then warms it up and tests it.

Its phases are what progress reports and failures name: ``build``, ``weights``, ``kv``, ``warmup``, ``ready``.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from glowplug.core.build import BuildContext
from glowplug.core.engine import Engine, RankClock
from glowplug.core.errors import GlowplugError
from glowplug.core.facts import ModelFacts
from glowplug.core.loading import load_model
from glowplug.core.memory.allocator import PageAllocator
from glowplug.core.memory.measure import MemoryMeter
from glowplug.core.memory.pool import KVPool
from glowplug.core.mesh import coordinates
from glowplug.core.offers import QuantizationOffers
from glowplug.core.parallel_stack import ParallelStack
from glowplug.core.plan import Choice, EnginePlan
from glowplug.core.plugins import PluginSet
from glowplug.core.profiling import Profiler
from glowplug.core.protocols import Limits, Model, QuantizationScheme, Scheduler, Worker
from glowplug.core.rank_controls import ControlHandler
from glowplug.core.rows import SequenceTable
from glowplug.core.runner import Runner
from glowplug.core.warmup import warm_up

Report = Callable[[str, int, int], None]  #: phase, done, total


def build_context(plan: EnginePlan, plugins: PluginSet, worker: Worker, *, facts: ModelFacts | None = None,
                  context: int | None = None) -> BuildContext:
    """What the plan's model builds from: fresh components. ``facts`` and ``context`` replace the plan's."""
    made = {slot: plugins.build(plan.choice(slot), plan, worker)
            for slot in ("quantization", "collectives", "attention", "ops")}
    joined = replace(worker, collectives=made["collectives"])
    strategies = [plugins.build(choice, plan, joined) for choice in plan.choices_in("parallel")]
    return BuildContext(
        facts=facts or plan.facts.model, worker=worker, dtype=worker.dtype,
        context=context or plan.sizes.context_length, scheme=made["quantization"],
        plain=_plain_scheme(plan, plugins, worker), parallel=ParallelStack(strategies), collectives=made["collectives"],
        attention=made["attention"], ops=made["ops"], spare=plan.sizes.positions - plan.sizes.context_length,
    )


def _plain_scheme(plan: EnginePlan, plugins: PluginSet, worker: Worker) -> QuantizationScheme:
    """The scheme for modules that a checkpoint leaves unquantized: the first that reads plain weights."""
    for component, _, _ in plugins.components("quantization"):
        offers = component.offers
        if isinstance(offers, QuantizationOffers) and "none" in offers.reads and not offers.online:
            choice = Choice("quantization", component.name, component.factory, {"use": component.name})
            scheme: QuantizationScheme = plugins.build(choice, plan, worker)
            return scheme
    raise GlowplugError("no registered quantization scheme reads unquantized weights")


class RankBuilder:
    """Makes the rank's objects in dependency order. One use; ``engine`` is the product."""

    def __init__(self, plan: EnginePlan, worker: Worker, plugins: PluginSet, report: Report) -> None:
        self.clock = RankClock()
        self.plan, self.plugins, self.report = plan, plugins, report
        self.worker = replace(worker, clock=self.clock)
        self.seconds: dict[str, float] = {}
        self.meter = MemoryMeter(worker.device)

    def component(self, slot: str) -> Any:
        return self.plugins.build(self.plan.choice(slot), self.plan, self.worker)

    def build(self) -> Engine:
        started = time.perf_counter()
        self.report("build", 0, 1)
        plan, sizes = self.plan, self.plan.sizes
        context = build_context(plan, self.plugins, self.worker)
        attention, speculative, family = context.attention, self.component("speculative"), self.component("model")
        model = family.build(context)
        draft = speculative.draft_model(self._behind(context), family, model)
        self._lap("build", started)
        self._load(model, draft)
        table, pool = self._reserve(attention, speculative)
        sampler = self.component("sampling")
        limits = self._limits(pool)
        for part in (attention, speculative, sampler):
            part.reserve(limits)
        runner = Runner(model=model, attention=attention, speculative=speculative, sampler=sampler,
                        graphs=self.component("graphs"), table=table, device=self.worker.device)
        scheduler = self.component("scheduler")
        pages = PageAllocator(sizes.num_pages)
        cache = self.component("cache")
        scheduler.bind(table, pages, cache, self.component("policy"))
        self._warm_up(runner, context.parallel)
        self._capture(runner)
        context.parallel.forget_load()
        return Engine(scheduler=scheduler, runner=runner, parallel=context.parallel, collectives=context.collectives,
                      overlap=plan.overlap, clock=self.clock, ranks=self.worker.ranks, leads=self.worker.rank == 0,
                      observers=self._observers(), controls=self._controls(scheduler, context.parallel),
                      closing=[self._stopping, runner.graphs.close, context.collectives.close])

    def _behind(self, context: BuildContext) -> BuildContext:
        """What a draft model builds from: cache layers behind the target's, and the facts of its own folder."""
        facts = self.plan.facts
        return replace(context, first_layer=facts.model.num_layers, facts=facts.draft or facts.model)

    def _stopping(self) -> None:
        self.plugins.call_each("worker_stopping", worker=self.worker)

    def _controls(self, scheduler: Scheduler, parallel: ParallelStack) -> dict[str, ControlHandler]:
        profiler = Profiler(self.worker.rank, self.worker.device)
        return {"info": lambda args: self.info(parallel), "check": lambda args: dict(scheduler.check()),
                "profile_start": profiler.start, "profile_stop": profiler.stop}

    def _load(self, model: Model, draft: Model | None) -> None:
        started, facts = time.perf_counter(), self.plan.facts
        parts = [(facts.model, [model])]
        if draft is not None:
            parts = [(facts.model, [model, draft])] if facts.draft is None else [*parts, (facts.draft, [draft])]
        for folder, models in parts:
            self._load_from(folder, models)
        self.meter.mark("weights")
        self._lap("weights", started)

    def _load_from(self, facts: ModelFacts, models: list[Model]) -> None:
        source = self.component("weights")
        source.open(facts)
        try:
            for model in models:
                load_model(model, source, facts, lambda done, total: self.report("weights", done, total))
        finally:
            source.close()

    def _reserve(self, attention: Any, speculative: Any) -> tuple[SequenceTable, KVPool]:
        started = time.perf_counter()
        self.report("kv", 0, 1)
        sizes = self.plan.sizes
        table = SequenceTable(sizes.max_running, sizes.positions, sizes.page_size)
        pool = KVPool(attention.kv_layout(), sizes.num_pages, self.worker.device)
        self.kv_bytes = pool.bytes
        self.meter.mark("kv cache")
        self._lap("kv", started)
        return table, pool

    def _limits(self, pool: KVPool) -> Limits:
        sizes = self.plan.sizes
        return Limits(rows=sizes.max_running + 1, step_tokens=sizes.max_step_tokens,
                      context=sizes.positions, page_size=sizes.page_size,
                      num_pages=sizes.num_pages, width=sizes.width,
                      vocab=self.plan.facts.model.vocab_size, kv=pool.layers, hidden=self.plan.facts.model.hidden_size)

    def _warm_up(self, runner: Runner, parallel: ParallelStack) -> None:
        started = time.perf_counter()
        self.report("warmup", 0, 1)
        warm_up(runner, self.plan, parallel.router())
        self.meter.mark("activations")
        self._lap("warmup", started)

    def _capture(self, runner: Runner) -> None:
        started = time.perf_counter()
        self.report("capture", 0, 1)
        runner.graphs.capture(runner, lambda done, total: self.report("capture", done, total))
        self.meter.mark("graphs")
        self._lap("capture", started)

    def _observers(self) -> list[Any]:
        found = self.plugins.call_each("step_observers", worker=self.worker, plan=self.plan)
        return [observer for _, group in found for observer in group or ()]

    def _lap(self, phase: str, started: float) -> None:
        self.seconds[phase] = time.perf_counter() - started

    def info(self, parallel: ParallelStack) -> dict[str, Any]:
        """What /server_info shows of this rank: start-up seconds by phase, planned and measured bytes by line, and
        where ranks share the experts how many tokens of this rank's have chosen each, by layer.

        On the CPU the KV pool's measured bytes are the touched part of it: untouched pages cost nothing.
        """
        sizes = self.plan.sizes
        memory = {line.name: {"planned": line.bytes, "measured": self.meter.lines.get(line.name)}
                  for line in self.plan.budget}
        info = {"startup_seconds": self.seconds, "kv_bytes": self.kv_bytes, "memory": memory,
                "max_total_num_tokens": (sizes.num_pages - 1) * sizes.page_size}
        load = parallel.expert_load()
        return {**info, "expert_load": load} if load else info


def make_worker(plan: EnginePlan, rank: int, rendezvous: str = "") -> Worker:
    """The rank's place: hosts hold neighbouring ranks, in equal numbers."""
    local = rank % -(-plan.ranks // plan.facts.hardware.hosts)
    device = plan.device if plan.device == "cpu" else f"{plan.device}:{local}"
    return Worker(rank=rank, ranks=plan.ranks, device=device, dtype=getattr(torch, plan.dtype),
                  coordinates=coordinates(rank, plan.mesh), rendezvous=rendezvous)


def build_rank(plan: EnginePlan, rank: int, plugins: PluginSet, report: Report, rendezvous: str = "") -> Engine:
    """One rank, ready to serve. Raises what went wrong; the last reported phase says where."""
    if plugins.fingerprint != plan.fingerprint:
        raise GlowplugError(f"rank {rank} loaded other plugins than the plan was made with "
                            f"({plugins.fingerprint} against {plan.fingerprint})")
    worker = make_worker(plan, rank, rendezvous)
    torch.manual_seed(plan.seed)
    builder = RankBuilder(plan, worker, plugins, report)
    engine = builder.build()
    plugins.call_each("worker_started", worker=builder.worker, plan=plan)
    report("ready", 1, 1)
    return engine
