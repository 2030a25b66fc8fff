"""Construction of one rank of a layout that runs without the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from glowplug.core.engine.controls import ControlHandler
from glowplug.core.engine.engine import Engine
from glowplug.core.engine.runner import Runner
from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import import_factory
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import GraphRunner, Scheduler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.startup.build_rank import RankBuilder, start_rank
from glowplug.core.startup.components import build_context, make_worker
from glowplug.core.startup.phases import Note, Report, logger
from glowplug.core.step.batch import Batch
from glowplug.entrypoints.bench.alone.copies import OPTIONAL, LoneRankCopies
from glowplug.entrypoints.bench.alone.strategies import LoneStack

EMBEDDING = "model.embed_tokens"


def builder_of(rank: int) -> Callable[[EnginePlan, int, PluginSet, Report], Engine]:
    """Return the function by which an executor of one rank builds ``rank`` of a layout."""

    def build(
        plan: EnginePlan, number: int, plugins: PluginSet, report: Report, note: Note = logger.info
    ) -> Engine:
        worker = make_worker(plan, rank)
        first = replace(worker, device=make_worker(plan, number).device)
        return start_rank(LoneRankBuilder, plan, first, plugins, report, note)

    return build


def copies_for(plan: EnginePlan, plugins: PluginSet, rank: int) -> LoneRankCopies:
    """Return copies with the optional methods that the plan's collectives have."""
    choice = plan.choice("collectives")
    found = plugins.find("collectives", choice.name)
    assert found is not None, "the plan was made with these plugins"
    factory = import_factory(found.component, f"{found.distribution} {found.version}".rstrip())
    optional = [name for name in OPTIONAL if hasattr(factory, name)]
    return LoneRankCopies(plan.mesh, rank, optional)


class LoneRankBuilder(RankBuilder):
    """The builder of a rank whose collectives are copies, and which leads its own loop."""

    def __init__(
        self, plan: EnginePlan, worker: Worker, plugins: PluginSet, report: Report, note: Note
    ) -> None:
        super().__init__(plan, worker, plugins, report, note)
        self.leads = True
        self._copies = copies_for(plan, plugins, worker.rank)

    def context(self) -> BuildContext:
        made = build_context(self.plan, self.plugins, self.worker, collectives=self._copies)
        worker = self.worker
        stack = LoneStack(made.parallel, self.plan, worker.rank, worker.device, self._copies.log)
        return replace(made, parallel=stack)

    def _controls(
        self, scheduler: Scheduler, runner: Runner, parallel: ParallelStack
    ) -> dict[str, ControlHandler]:
        assert isinstance(parallel, LoneStack), "``context`` has made it"
        own = LoneControls(parallel, runner, self._copies, self.plan.facts.model.vocab_size)
        return {
            **super()._controls(scheduler, runner, parallel),
            "alone": own.describe,
            "busy_groups": own.set_busy,
            "count_exchanges": own.count,
        }


class LoneControls:
    """The controls of a rank that runs alone.

    Args:
        parallel: the rank's strategies.
        runner: the rank's runner.
        copies: its collectives.
        vocab: number of tokens of the vocabulary.
    """

    def __init__(
        self, parallel: LoneStack, runner: Runner, copies: LoneRankCopies, vocab: int
    ) -> None:
        self._parallel = parallel
        self._runner = runner
        self._log = copies.log
        self._vocab = vocab
        self._graphs: GraphRunner | None = None

    def describe(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return how other groups choose experts, and the tokens whose embeddings are here.

        All other tokens have embeddings of zeros, which would choose the same experts.
        """
        held = self._parallel.shard("vocab", EMBEDDING, self._vocab)
        return {"routing": self._parallel.routing, "tokens": [held.start, held.size]}

    def set_busy(self, args: dict[str, Any]) -> dict[str, Any]:
        """Let ``args["groups"]`` groups seem to have work.

        Raises:
            RequestError: the strategies cannot leave other groups without work.
        """
        if not self._parallel.set_busy(args["groups"]):
            raise RequestError(
                "every group has this one's tokens in this layout, so a batch smaller than the "
                "number of groups cannot be measured"
            )
        return {}

    def count(self, args: dict[str, Any]) -> dict[str, Any]:
        """Run steps eagerly and keep their exchanges from ``args["on"]`` = True to False.

        Returns:
            "turns": the exchanges of each turn in between, once it is over.
        """
        if args["on"]:
            self._graphs = self._runner.graphs
            self._runner.graphs = Uncaptured()
            self._log.keep()
            return {}
        assert self._graphs is not None, "counting was on"
        self._runner.graphs = self._graphs
        return {"turns": self._log.take()}


class Uncaptured:
    """A ``GraphRunner`` without graphs, by which every step runs eagerly."""

    def shapes(self, plan: EnginePlan) -> list[Any]:
        return []

    def capture(self, steps: object, report: Callable[[int, int], None]) -> None:
        return None

    def graph_for(self, batch: Batch) -> None:
        return None

    def fill(self, graph: object, batch: Batch) -> Batch:
        raise AssertionError("there is no graph to fill")

    def pass_for(self, batch: Batch) -> None:
        return None

    def close(self) -> None:
        return None
