"""Several ranks of a plan as threads of one process, in lockstep: a whole engine without processes
or pipes.

A plugin author checks a parallel strategy, an exchange or a draft against one rank in
milliseconds::

    config = {"model": folder, "parallel": [{"use": "tensor", "size": 2}], "weights": {"use":
    "random"}} alone = run_ranks(one_rank, [submit(1, [5, 6, 7])])
    assert run_ranks(config, [submit(1, [5, 6, 7])])[1].tokens == alone[1].tokens

``collectives.use = "threads"`` (``rank_plan``'s default for several ranks) exchanges through shared
lists; any other backend runs as it would among processes, as far as it allows several ranks in one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from glowplug.core.engine.engine import Engine
from glowplug.core.errors import CollectiveError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.startup.build_rank import build_rank
from glowplug.core.startup.components import load_plugins_for
from glowplug.core.step.messages import (
    Control,
    Inbound,
    Outbound,
    Reply,
    Stats,
    StepOutput,
    Submit,
    encode,
    packed_ids,
)
from glowplug.core.step.request import SamplingParams
from glowplug.core.testing.harness.drive import Collected, collect
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting

THREADS = "glowplug.core.testing.harness.threads"  #: the plugin of in-memory collectives
SWITCH = 1e-4  #: seconds a thread may hold the interpreter while others wait
Result = TypeVar("Result")


def submit(id: int, prompt: Seq[int], max_tokens: int = 8, **more: Any) -> Submit:
    """A greedy request that runs to ``max_tokens``; ``more`` are sampling parameters."""
    params = {"temperature": 0.0, "ignore_eos": True, "seed": id, **more}
    return Submit(id, packed_ids(prompt), SamplingParams(max_tokens=max_tokens, **params))


def rank_plan(config: Mapping[str, Any], plugins: PluginSet | None = None) -> EnginePlan:
    """The plan of ``config`` with in-memory collectives unless it names others. PlanRefused as
    ever.

    ``plugins`` must hold the plugin ``THREADS`` to use them; None: built-ins and that one.
    """
    plugins = plugins or load_plugins([THREADS], entry_points=False)
    contributed = (
        {"collectives.use": "threads", "executor.oversubscribe": True}
        if config.get("parallel")
        else {}
    )
    return make_plan(config, plugins=plugins, contributed=contributed)


class RankSet:
    """Every rank of ``plan``, built, and driven turn by turn. A context manager; ``close`` ends the
    threads.

    Attributes:
        engines: by rank.
        heard: what the front would have heard of each submitted sequence, by id.
        stats: the last statistics of each data-parallel group.
        replies: answers to Controls, by their id.

    Whatever a rank raises is raised here, the cause before its consequences, and ends the set.
    """

    def __init__(
        self, plan: EnginePlan, plugins: PluginSet | None = None, timeout: float = 120.0
    ) -> None:
        self.plan = plan
        self.timeout = timeout
        self.heard: dict[int, Collected] = {}
        self.stats: dict[int, Stats] = {}
        self.replies: dict[int, Reply] = {}
        self._controls = 0
        self._switch = sys.getswitchinterval()
        self._threads = torch.get_num_threads()
        self._folder = tempfile.TemporaryDirectory(prefix="glowplug-ranks-")
        self._rendezvous = f"file://{self._folder.name}/ranks"
        self._meeting = MEETINGS[self._rendezvous] = Meeting()
        self._pools = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(plan.ranks)]
        self.engines: list[Engine] = []
        sys.setswitchinterval(SWITCH)
        found = plugins or load_plugins_for(plan)
        try:
            self.engines = self._each(lambda rank: self._build(rank, found))
        except BaseException:
            self.close()
            raise

    def _build(self, rank: int, plugins: PluginSet) -> Engine:
        torch.set_num_threads(1)
        return build_rank(
            self.plan, rank, plugins, lambda phase, done, total: None, self._rendezvous
        )

    def _each(self, work: Callable[[int], Result]) -> list[Result]:
        """``work`` of every rank, each in its own thread; their results by rank."""
        futures: list[Future[Result]] = [
            pool.submit(work, rank) for rank, pool in enumerate(self._pools)
        ]
        done, _ = wait(futures, self.timeout, return_when=FIRST_EXCEPTION)
        if len(done) < len(futures) or any(future.exception() for future in done):
            self._meeting.end()
            wait(futures, self.timeout)
        errors = [
            error
            for future in futures
            if future.done() and (error := future.exception()) is not None
        ]
        errors.sort(key=lambda error: isinstance(error, CollectiveError))
        if errors:
            raise errors[0]
        stuck = [rank for rank, future in enumerate(futures) if not future.done()]
        if stuck:
            raise TimeoutError(
                f"ranks {stuck} have not finished a turn within {self.timeout:.0f} s"
            )
        return [future.result() for future in futures]

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self.engines)

    def turn(self, messages: Seq[Inbound] = ()) -> list[list[Outbound]]:
        """One turn of every rank, on ``messages`` from the front. What each rank made of it, by
        rank.
        """
        for message in messages:
            if isinstance(message, Submit):
                self.heard[message.id] = Collected()
        frames = [encode(list(messages))] if messages else []
        made = self._each(lambda rank: self.engines[rank].turn(frames if rank == 0 else ()) or [])
        for outputs in made:
            self._hear(outputs)
        return made

    def _hear(self, outputs: Iterable[Outbound]) -> None:
        for output in outputs:
            if isinstance(output, Reply):
                self.replies[output.id] = output
            elif isinstance(output, StepOutput):
                collect(self.heard, output)
                if output.stats is not None:
                    self.stats[output.stats.group] = output.stats

    def run(self, messages: Seq[Inbound] = (), most: int = 20_000) -> dict[int, Collected]:
        """Turns until every rank is idle; what was heard. AssertionError when that does not come."""
        self.turn(messages)
        for _ in range(most):
            if self.idle:
                return self.heard
            self.turn()
        raise AssertionError(
            f"not idle after {most} turns: {[e.scheduler.load() for e in self.engines]}"
        )

    def control(self, action: str, **args: Any) -> Reply:
        """Rank 0's answer. AssertionError when it says that something is wrong."""
        self._controls += 1
        self.turn([Control(self._controls, action, args)])
        reply = self.replies[self._controls]
        assert reply.ok, reply.error
        return reply

    def check_idle(self) -> None:
        """Integrity on every rank; every page free or evictable; every row free. AssertionError or
        a CacheFault.
        """
        for rank, engine in enumerate(self.engines):
            engine.scheduler.check()
            stats = engine.scheduler.load()
            table = engine.runner.table
            assert stats.pages_free + stats.pages_evictable == stats.pages_total, (
                f"rank {rank} has lost pages: {stats}"
            )
            assert (stats.running, stats.waiting) == (0, 0), f"rank {rank} is not idle: {stats}"
            assert table.free_rows == table.rows, f"rank {rank} has lost rows"

    def close(self) -> None:
        """Idempotent. Ranks close together, as collectives among processes may need."""
        pools = self._pools
        self._pools = []
        try:
            wait(
                [pool.submit(engine.close) for pool, engine in zip(pools, self.engines)],
                self.timeout,
            )
        finally:
            self._meeting.end()
            for pool in pools:
                pool.shutdown(wait=False)
            MEETINGS.pop(self._rendezvous, None)
            self._folder.cleanup()
            sys.setswitchinterval(self._switch)
            torch.set_num_threads(self._threads)

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def run_ranks(
    config: Mapping[str, Any],
    messages: Seq[Inbound],
    plugins: PluginSet | None = None,
) -> dict[int, Collected]:
    """Plan, build, run ``messages`` to the end, check that every page came back; what the front
    heard, by id.
    """
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        heard = ranks.run(messages)
        ranks.check_idle()
        return heard
