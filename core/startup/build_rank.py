"""Construction of one rank from a plan: components, model, weights, KV pool and loop.

The rank is then warmed up and tested. Progress reports and failures name these phases:
``build``, ``weights``, ``kernels`` (on a device: the largest steps are measured), ``kv``,
``capture``, ``self-test``, ``ready``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from glowplug.core.engine.controls import ControlHandler, forget_load
from glowplug.core.engine.engine import Engine, RankClock
from glowplug.core.engine.profiling import Profiler, step_phases
from glowplug.core.engine.runner import Runner
from glowplug.core.engine.stalls import StallWatch
from glowplug.core.engine.stream_probe import StreamProbe
from glowplug.core.engine.tiers.rank_tier import open_tier
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Collectives, Model, ModelFamily, Scheduler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.speculation.simulated import simulation_of
from glowplug.core.startup.components import (
    build_attention,
    build_component,
    build_context,
    foresees,
    make_worker,
)
from glowplug.core.startup.draft_costs import adapt, described, draft_costs
from glowplug.core.startup.grammars import rank_grammars
from glowplug.core.startup.load_weights import load_model
from glowplug.core.startup.memory_fit import RankMemory
from glowplug.core.startup.memory_gauge import memory_now
from glowplug.core.startup.phases import Note, Phases, Report, logger, rate
from glowplug.core.startup.torch_allocator import use_expandable_segments
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.step.to_host import host_copier


class RankBuilder:
    """A builder that makes the objects of one rank in dependency order; it is used once.

    Attributes:
        clock: the rank's clock, which the loop keeps equal on all ranks.
        plan: the plan; ``build`` sets its number of pages to the one that the rank really has.
        phases: durations of the start-up phases, and their log lines.
        worker: the rank's number, device and mesh coordinates, with ``clock``.
        memory: measurements of the rank's memory.
        leads: True: this rank receives the front end's messages for all ranks; rank 0 does.
    """

    def __init__(
        self, plan: EnginePlan, worker: Worker, plugins: PluginSet, report: Report, note: Note
    ) -> None:
        self.clock = RankClock()
        self.plan = plan
        self.plugins = plugins
        self.phases = Phases(report, note, worker.device)
        self.worker = replace(worker, clock=self.clock)
        self.memory = RankMemory(plan, worker)
        self.leads = worker.rank == 0

    def component(self, slot: str, choice: Choice | None = None) -> Any:
        """Build ``choice``, or by default the plan's for ``slot``."""
        choice = choice or self.plan.choice(slot)
        with self.phases.building():
            return build_component(self.plugins, choice, self.plan, self.worker)

    def context(self) -> BuildContext:
        """Return the context that the model is built from, with newly built components."""
        return build_context(self.plan, self.plugins, self.worker)

    def build(self) -> Engine:
        """Run all start-up phases but ``ready`` and return the rank's engine."""
        with self.phases.run("build"):
            context = self.context()
            model, draft, speculative = self._models(context)
        self._load(model, draft, context.collectives)
        runner = self._runner(context, model, speculative)
        self._make_pool(runner, context)
        with self.phases.run("capture") as remarks:
            with self.memory.capturing():
                runner.graphs.capture(runner, self.phases.progress("capture"))
            remarks.append(self.memory.graphs())
        with self.phases.run("self-test") as remarks:
            self.memory.test(runner, context.parallel)
            costs = draft_costs(runner, self.plan, context.collectives, self.leads)
            remarks += [described(costs)] if costs else []
        context.parallel.forget_load()
        if self.memory.measures:
            self.phases.note(self.memory.summary())
        return self._engine(runner, context, costs)

    def _engine(self, runner: Runner, context: BuildContext, costs: DraftCosts | None) -> Engine:
        """Bind the scheduler and return the engine.

        ``costs``: costs by which steps choose their draft shape; None: all steps have the same one.
        """
        self.phases.end()
        scheduler = self.component("scheduler")
        policy = self.component("policy")
        cache = self.component("cache")
        scheduler.bind(runner.table, PageAllocator(self.plan.sizes.num_pages), cache, policy)
        closes_tier = self._open_tier(runner, cache)
        adapt(scheduler, self.plan, costs, runner.speculative, foresees(self.plan, self.plugins))
        router = context.parallel.router()
        if router is not None:
            router.shares = cache.shares
        return Engine(
            scheduler=scheduler,
            runner=runner,
            parallel=context.parallel,
            collectives=context.collectives,
            plan=self.plan,
            clock=self.clock,
            stalls=StallWatch(self.plan, policy, runner.table),
            ranks=self.worker.ranks,
            leads=self.leads,
            observers=self._observers(),
            controls=self._controls(scheduler, runner, context.parallel),
            closing=[
                self._stopping,
                *closes_tier,
                runner.grammars.close,
                runner.graphs.close,
                context.collectives.close,
            ],
        )

    def _open_tier(self, runner: Runner, cache: Any) -> list[Callable[[], None]]:
        """Give the runner the cache's tier, if the plan has one, and return its ``close``."""
        memory = self.memory
        runner.tier = open_tier(cache, self.plan, memory.kv, runner.speculative, memory.meter.lines)
        return [] if runner.tier is None else [runner.tier.close]

    def _models(self, context: BuildContext) -> tuple[Model, Model | None, Any]:
        """Return the target and the draft (None: none), without weights, and the algorithm."""
        speculative = self.component("speculative")
        family = self.component("model")
        model = family.build(context)
        self.memory.mark_model("weights", model)
        own, drafting = self._draft_parts(context, family)
        draft = speculative.draft_model(own, drafting, model)
        if draft is not None:
            self.memory.mark_model("draft weights", draft)
        return model, draft, speculative

    def _draft_parts(
        self, context: BuildContext, family: ModelFamily
    ) -> tuple[BuildContext, ModelFamily]:
        """Return the context and the family that build a draft model.

        A draft that is a whole model has its own context and family. Any other draft shares the
        target's context, with the facts of the draft's folder if it has one. Its family and
        attention are its own if the plan has ``draft_choices``; otherwise they are the target's,
        and the draft's cache layers follow the target's.
        """
        plan = self.plan
        facts = plan.facts
        if not plan.draft_choices:
            first = facts.model.num_layers
            return replace(context, first_layer=first, facts=facts.draft or facts.model), family
        own = plan.of_draft()
        parts = self.plugins, own, self.worker
        if plan.whole_draft:
            made = build_context(own, parts[0], parts[2], collectives=context.collectives)
        else:
            made = replace(context, facts=own.facts.model, attention=build_attention(*parts))
        return made, build_component(parts[0], own.choice("model"), own, parts[2])

    def _runner(self, context: BuildContext, model: Model, speculative: Any) -> Runner:
        plan = self.plan
        sizes = plan.sizes
        return Runner(
            model=model,
            attention=context.attention,
            speculative=speculative,
            sampler=self.component("sampling"),
            graphs=self.component("graphs"),
            table=SequenceTable(sizes.max_running, sizes.positions, sizes.page_size),
            device=self.worker.device,
            split_points=context.split_points,
            draft_extend=context.draft_extend,
            sampled_last_layer=plan.sampled_last_layer,
            layers=plan.facts.model.num_layers,
            simulated=simulation_of(plan, self.worker),
            grammars=rank_grammars(plan, self.plugins, self.worker),
            plan=plan,
            copier=host_copier(self.worker.device, getattr(context.ops, "copy_small", None)),
        )

    def _stopping(self) -> None:
        self.plugins.call_each("worker_stopping", worker=self.worker)

    def _controls(
        self, scheduler: Scheduler, runner: Runner, parallel: ParallelStack
    ) -> dict[str, ControlHandler]:
        profiler = Profiler(self.worker.rank, self.worker.device, step_phases(scheduler, runner))
        return {
            "info": lambda args: self.info(parallel),
            "forget_load": lambda args: forget_load(parallel),
            "check": lambda args: dict(scheduler.check()),
            "streams": StreamProbe(runner, scheduler, self.plan, self.worker.rank, parallel),
            "memory": lambda args: dict(memory_now(self.memory.gauge)),
            "profile_start": profiler.start,
            "profile_stop": profiler.stop,
        }

    def _load(self, model: Model, draft: Model | None, collectives: Collectives) -> None:
        """Load the weights, log bytes and rate, and wait for ranks that still load."""
        facts = self.plan.facts
        folders = [(facts.model, {"weights": model})]
        if draft is not None:
            if facts.draft is not None:
                folders.append((facts.draft, {}))
            folders[-1][1]["draft weights"] = draft
        with self.phases.run("weights") as remarks:
            started = time.perf_counter()
            size = sum(self._load_from(folder, models) for folder, models in folders)
            self.memory.gauge.settle()
            remarks.append(rate(size, time.perf_counter() - started))
        meet: Callable[[str], None] | None = getattr(collectives, "meet", None)
        if meet is not None:
            meet("load")

    def _load_from(self, facts: ModelFacts, models: dict[str, Model]) -> int:
        """Load the models stored in one folder and return the number of bytes read.

        ``models``: the models stored there, by the budget line of their weights.
        """
        of_draft = facts is self.plan.facts.draft
        source = self.component("weights", self.plan.draft_source if of_draft else None)
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
        """Make the KV pool, with the measured number of pages on a device."""
        planned = self.plan.sizes.num_pages
        if self.memory.measures:
            with self.phases.run("kernels") as remarks:
                measured = self.memory.fit(runner, context.parallel, context.collectives)
                remarks.append(f"a step takes {human(measured.step)}")
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
        """Return this rank's part of /server_info.

        It has the times of the start, the bytes of each budget line and, if ranks share the
        experts, the number of this rank's tokens that chose each expert, by layer.

        On the CPU only the touched pages of the KV pool count.
        """
        sizes = self.plan.sizes
        info = {
            **self.phases.times(),
            "kv_bytes": sizes.kv_bytes,
            "memory": self.memory.report(),
            "max_total_num_tokens": (sizes.num_pages - 1) * sizes.page_size,
        }
        load = parallel.expert_load()
        return {**info, "expert_load": load} if load else info


def build_rank(
    plan: EnginePlan,
    rank: int,
    plugins: PluginSet,
    report: Report,
    rendezvous: str = "",
    note: Note = logger.info,
) -> Engine:
    """Build one rank and return its engine, ready to serve.

    If start-up fails, the last reported phase is the one that failed.

    Args:
        rank: number of the rank.
        report: called with (phase, done, total).
        rendezvous: address at which the ranks meet; "" for one rank.
        note: called with one log line at the end of each phase.

    Raises:
        GlowplugError: see ``start_rank``.
    """
    worker = make_worker(plan, rank, rendezvous)
    return start_rank(RankBuilder, plan, worker, plugins, report, note)


def start_rank(
    make_builder: type[RankBuilder],
    plan: EnginePlan,
    worker: Worker,
    plugins: PluginSet,
    report: Report,
    note: Note,
) -> Engine:
    """Build a rank on its worker's device, and return its engine, ready to serve.

    Args:
        make_builder: class of the builder.
        worker: the rank.
        report: see ``build_rank``.
        note: see ``build_rank``.

    Raises:
        GlowplugError: the loaded plugins are not the plan's, or a phase failed.
    """
    if plugins.fingerprint != plan.plugin_fingerprint:
        raise GlowplugError(
            f"rank {worker.rank} loaded other plugins than the plan was made with "
            f"(fingerprint {plugins.fingerprint}, plan {plan.plugin_fingerprint})"
        )
    if worker.device != "cpu":
        # the allocator's settings apply only to memory that it takes afterwards
        for remark in use_expandable_segments(plan.expandable_segments):
            note(remark)
        torch.cuda.set_device(worker.device)  # streams and events are created on this device
    torch.manual_seed(plan.seed)
    builder = make_builder(plan, worker, plugins, report, note)
    engine = builder.build()
    plugins.call_each("worker_started", worker=builder.worker, plan=plan)
    report("ready", 1, 1)
    return engine
