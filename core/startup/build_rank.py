"""Builds one rank from a plan: components, model, weights, KV pool, loop; then warms it up and
tests it.

Its phases are what progress reports and failures name: ``build``, ``weights``, ``kernels`` (on a
device: the largest steps run over a small pool, and what they take is measured), ``kv``,
``capture``, ``self-test``, ``ready``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from glowplug.core.engine.controls import ControlHandler
from glowplug.core.engine.engine import Engine, RankClock
from glowplug.core.engine.profiling import Profiler, step_phases
from glowplug.core.engine.runner import Runner
from glowplug.core.engine.stalls import StallWatch
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.mesh import coordinates
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.budget.sizes import human
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Model, QuantizationScheme, Scheduler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.components import build_component
from glowplug.core.startup.load_weights import load_model
from glowplug.core.startup.memory_fit import RankMemory
from glowplug.core.startup.memory_gauge import memory_now
from glowplug.core.startup.phases import Note, Phases, Report, logger, rate
from glowplug.core.startup.torch_allocator import use_segments
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.sequence_table import SequenceTable


def build_context(
    plan: EnginePlan,
    plugins: PluginSet,
    worker: Worker,
    *,
    facts: ModelFacts | None = None,
    context: int | None = None,
) -> BuildContext:
    """What the plan's model builds from: fresh components. ``facts`` and ``context`` replace the
    plan's.
    """
    made = {
        slot: build_component(plugins, plan.choice(slot), plan, worker)
        for slot in ("quantization", "collectives", "attention", "ops")
    }
    joined = replace(worker, collectives=made["collectives"])
    strategies = [
        build_component(plugins, choice, plan, joined) for choice in plan.choices_in("parallel")
    ]
    return BuildContext(
        facts=facts or plan.facts.model,
        worker=worker,
        dtype=worker.dtype,
        context=context or plan.sizes.context_length,
        scheme=made["quantization"],
        plain=_plain_scheme(plan, plugins, worker),
        parallel=ParallelStack(strategies),
        collectives=made["collectives"],
        attention=made["attention"],
        ops=made["ops"],
        spare=plan.sizes.positions - plan.sizes.context_length,
    )


def _plain_scheme(plan: EnginePlan, plugins: PluginSet, worker: Worker) -> QuantizationScheme:
    """The scheme for modules that a checkpoint leaves unquantized: the first that reads plain
    weights.
    """
    for component, _, _ in plugins.components("quantization"):
        offers = component.offers
        if isinstance(offers, QuantizationOffers) and "none" in offers.reads and not offers.online:
            choice = Choice(
                "quantization", component.name, component.factory, {"use": component.name}
            )
            scheme: QuantizationScheme = build_component(plugins, choice, plan, worker)
            return scheme
    raise GlowplugError("no registered quantization scheme reads unquantized weights")


class RankBuilder:
    """Makes the rank's objects in dependency order. One use; ``engine`` is the product."""

    def __init__(
        self, plan: EnginePlan, worker: Worker, plugins: PluginSet, report: Report, note: Note
    ) -> None:
        self.clock = RankClock()
        self.plan = plan
        self.plugins = plugins
        self.phases = Phases(report, note)
        self.worker = replace(worker, clock=self.clock)
        self.memory = RankMemory(plan, worker)

    def component(self, slot: str) -> Any:
        return build_component(self.plugins, self.plan.choice(slot), self.plan, self.worker)

    def build(self) -> Engine:
        with self.phases.run("build"):
            context = build_context(self.plan, self.plugins, self.worker)
            model, draft, speculative = self._models(context)
        self._load(model, draft)
        runner = self._runner(context, model, speculative)
        self._make_pool(runner, context)
        with self.phases.run("capture") as remarks:
            with self.memory.capturing():
                runner.graphs.capture(runner, self.phases.progress("capture"))
            remarks.append(self.memory.graphs())
        with self.phases.run("self-test"):
            self.memory.test(runner, context.parallel)
        context.parallel.forget_load()
        if self.memory.measures:
            self.phases.note(self.memory.summary())
        return self._engine(runner, context)

    def _engine(self, runner: Runner, context: BuildContext) -> Engine:
        scheduler = self.component("scheduler")
        policy = self.component("policy")
        scheduler.bind(
            runner.table, PageAllocator(self.plan.sizes.num_pages), self.component("cache"), policy
        )
        return Engine(
            scheduler=scheduler,
            runner=runner,
            parallel=context.parallel,
            collectives=context.collectives,
            overlap=self.plan.overlap,
            clock=self.clock,
            stalls=StallWatch(self.plan, policy, runner.table),
            ranks=self.worker.ranks,
            leads=self.worker.rank == 0,
            observers=self._observers(),
            controls=self._controls(scheduler, runner, context.parallel),
            closing=[self._stopping, runner.graphs.close, context.collectives.close],
        )

    def _models(self, context: BuildContext) -> tuple[Model, Model | None, Any]:
        speculative = self.component("speculative")
        family = self.component("model")
        model = family.build(context)
        self.memory.mark_model("weights", model)
        draft = speculative.draft_model(self._behind(context), family, model)
        if draft is not None:
            self.memory.mark_model("draft weights", draft)
        return model, draft, speculative

    def _runner(self, context: BuildContext, model: Model, speculative: Any) -> Runner:
        sizes = self.plan.sizes
        return Runner(
            model=model,
            attention=context.attention,
            speculative=speculative,
            sampler=self.component("sampling"),
            graphs=self.component("graphs"),
            table=SequenceTable(sizes.max_running, sizes.positions, sizes.page_size),
            device=self.worker.device,
            cuts=context.cuts,
            extension=context.extension,
            sampled_last_layer=self.plan.sampled_last_layer,
        )

    def _behind(self, context: BuildContext) -> BuildContext:
        """What a draft model builds from: cache layers behind the target's, and the facts of its
        own folder.
        """
        facts = self.plan.facts
        return replace(
            context, first_layer=facts.model.num_layers, facts=facts.draft or facts.model
        )

    def _stopping(self) -> None:
        self.plugins.call_each("worker_stopping", worker=self.worker)

    def _controls(
        self, scheduler: Scheduler, runner: Runner, parallel: ParallelStack
    ) -> dict[str, ControlHandler]:
        profiler = Profiler(self.worker.rank, self.worker.device, step_phases(scheduler, runner))
        return {
            "info": lambda args: self.info(parallel),
            "check": lambda args: dict(scheduler.check()),
            "memory": lambda args: dict(memory_now(self.memory.gauge)),
            "profile_start": profiler.start,
            "profile_stop": profiler.stop,
        }

    def _load(self, model: Model, draft: Model | None) -> None:
        facts = self.plan.facts
        parts = [(facts.model, {"weights": model})]
        if draft is not None:
            if facts.draft is not None:
                parts.append((facts.draft, {}))
            parts[-1][1]["draft weights"] = draft
        with self.phases.run("weights") as remarks:
            started = time.perf_counter()
            size = sum(self._load_from(folder, held) for folder, held in parts)
            self.memory.gauge.settle()
            remarks.append(rate(size, time.perf_counter() - started))

    def _load_from(self, facts: ModelFacts, models: dict[str, Model]) -> int:
        """Bytes read from one folder."""
        source = self.component("weights")
        size = 0
        source.open(facts)
        try:
            for line, model in models.items():
                size += load_model(model, source, facts, self.phases.progress("weights"))
                self.memory.meter.mark(line)
        finally:
            source.close()
        return size

    def _make_pool(self, runner: Runner, context: BuildContext) -> None:
        """The real pool; on a device of a size that was measured, else of the planned one."""
        planned = self.plan.sizes.num_pages
        if self.memory.measures:
            with self.phases.run("kernels") as remarks:
                left = self.memory.fit(runner, context.parallel, context.collectives)
                remarks.append(f"a step takes {human(left.step)}")
        with self.phases.run("kv") as remarks:
            remarks += filter(None, [self.memory.check_cache(runner)])
            pool = self.memory.make_pool(runner)
            self.plan = self.memory.plan
            remarks.append(
                f"{human(pool.bytes)}, {pool.num_pages} pages of {self.plan.sizes.page_size} tokens"
                + (f", {planned} planned" if planned != pool.num_pages else "")
            )

    def _observers(self) -> list[Any]:
        found = self.plugins.call_each("step_observers", worker=self.worker, plan=self.plan)
        return [observer for _, group in found for observer in group or ()]

    def info(self, parallel: ParallelStack) -> dict[str, Any]:
        """What /server_info shows of this rank: start-up seconds by phase, planned and measured
        bytes by line, and where ranks share the experts how many tokens of this rank's have chosen
        each, by layer.

        On the CPU the KV pool's measured bytes are the touched part of it: untouched pages cost
        nothing.
        """
        sizes = self.plan.sizes
        info = {
            "startup_seconds": self.phases.seconds,
            "kv_bytes": sizes.kv_bytes,
            "memory": self.memory.report(),
            "max_total_num_tokens": (sizes.num_pages - 1) * sizes.page_size,
        }
        load = parallel.expert_load()
        return {**info, "expert_load": load} if load else info


def make_worker(plan: EnginePlan, rank: int, rendezvous: str = "") -> Worker:
    """The rank's place: hosts hold neighbouring ranks, in equal numbers."""
    local = rank % -(-plan.ranks // plan.facts.hardware.hosts)
    device = plan.device if plan.device == "cpu" else f"{plan.device}:{local}"
    return Worker(
        rank=rank,
        ranks=plan.ranks,
        device=device,
        dtype=getattr(torch, plan.dtype),
        coordinates=coordinates(rank, plan.mesh),
        rendezvous=rendezvous,
    )


def build_rank(
    plan: EnginePlan,
    rank: int,
    plugins: PluginSet,
    report: Report,
    rendezvous: str = "",
    note: Note = logger.info,
) -> Engine:
    """One rank, ready to serve. Raises what went wrong; the last reported phase says where.

    ``note`` gets a line for the log as each phase ends.
    """
    if plugins.fingerprint != plan.plugin_fingerprint:
        raise GlowplugError(
            f"rank {rank} loaded other plugins than the plan was made with "
            f"({plugins.fingerprint} against {plan.plugin_fingerprint})"
        )
    worker = make_worker(plan, rank, rendezvous)
    if worker.device != "cpu":
        for remark in use_segments(plan.growing_segments):  # before the allocator has anything
            note(remark)
        torch.cuda.set_device(worker.device)  # where streams and events are made
    torch.manual_seed(plan.seed)
    builder = RankBuilder(plan, worker, plugins, report, note)
    engine = builder.build()
    plugins.call_each("worker_started", worker=builder.worker, plan=plan)
    report("ready", 1, 1)
    return engine
