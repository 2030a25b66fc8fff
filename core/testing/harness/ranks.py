"""Several ranks of a plan as threads of one process, in lockstep.

This is a whole engine without processes or pipes. A plugin author can compare a parallelism
strategy, an exchange or a draft with one rank in milliseconds::

    one_rank = {"model": folder, "weights": {"use": "random"}}
    config = {**one_rank, "parallel": [{"use": "tensor", "size": 2}]}
    alone = run_ranks(one_rank, [submit(1, [5, 6, 7])])
    assert run_ranks(config, [submit(1, [5, 6, 7])])[1].tokens == alone[1].tokens

``collectives.use = "threads"`` (``rank_plan``'s default for several ranks) exchanges through shared
lists. Any other backend runs as among processes, if it allows several ranks in one process.
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
from glowplug.core.testing.harness.threads import COLLECTIVES
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting

THREADS = "glowplug.core.testing.harness.threads"  #: the plugin of in-memory collectives
SWITCH_SECONDS = 1e-4  #: seconds that a thread may hold the interpreter while others wait
Result = TypeVar("Result")


def submit(id: int, prompt: Seq[int], max_tokens: int = 8, **more: Any) -> Submit:
    """Return a greedy request that runs to ``max_tokens``; ``more`` are sampling parameters."""
    params = {"temperature": 0.0, "ignore_eos": True, "seed": id, **more}
    return Submit(id, packed_ids(prompt), SamplingParams(max_tokens=max_tokens, **params))


def rank_plan(config: Mapping[str, Any], plugins: PluginSet | None = None) -> EnginePlan:
    """Return the plan of ``config``, with in-memory collectives unless it names others.

    Args:
        config: the configuration.
        plugins: the plugins, which must include ``THREADS`` if its collectives are used. None: the
            built-ins, those of installed distributions and ``THREADS``.

    Raises:
        PlanRefused: the configuration is refused.
    """
    plugins = plugins or load_plugins([THREADS])
    contributed = (
        {"collectives.use": COLLECTIVES, "executor.oversubscribe": True}
        if config.get("parallel")
        else {}
    )
    return make_plan(config, plugins=plugins, contributed=contributed)


class RankSet:
    """All ranks of ``plan``, built and driven turn by turn; a context manager.

    An error of any rank is raised here, the cause before its consequences, and ends the set.
    ``close`` ends the threads.

    Attributes:
        engines: each rank's engine, by rank.
        collected: the front's outputs for each submitted sequence, by id.
        stats: the last statistics of each data-parallel group.
        replies: replies to Controls, by their id.
    """

    def __init__(
        self, plan: EnginePlan, plugins: PluginSet | None = None, timeout: float = 120.0
    ) -> None:
        self.plan = plan
        self.timeout = timeout
        self.collected: dict[int, Collected] = {}
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
        sys.setswitchinterval(SWITCH_SECONDS)
        found = plugins or load_plugins_for(plan)
        try:
            self.engines = self._each(lambda rank: self._build(rank, found))
        except BaseException:
            self.close()
            raise

    def _build(self, rank: int, plugins: PluginSet) -> Engine:
        """Build one rank's engine, with one torch thread."""
        torch.set_num_threads(1)
        return build_rank(
            self.plan, rank, plugins, lambda phase, done, total: None, self._rendezvous
        )

    def _run(self, work: Callable[[int], Result], rank: int) -> Result:
        """Call ``work`` for one rank, in its turn; see ``Meeting.turn``."""
        with self._meeting.turn(rank, self.plan.choice("collectives").name):
            return work(rank)

    def _each(self, work: Callable[[int], Result]) -> list[Result]:
        """Call ``work`` for every rank, each in its own thread, and return the results by rank."""
        futures: list[Future[Result]] = [
            pool.submit(self._run, work, rank) for rank, pool in enumerate(self._pools)
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
        """True: every engine is idle."""
        return all(engine.idle for engine in self.engines)

    def turn(self, messages: Seq[Inbound] = ()) -> list[list[Outbound]]:
        """Run one turn of every rank.

        Args:
            messages: messages from the front.

        Returns:
            The outputs of each rank, by rank.
        """
        for message in messages:
            if isinstance(message, Submit):
                self.collected[message.id] = Collected()
        frames = [encode(list(messages))] if messages else []
        made = self._each(lambda rank: self.engines[rank].turn(frames if rank == 0 else ()) or [])
        for outputs in made:
            self._collect(outputs)
        return made

    def _collect(self, outputs: Iterable[Outbound]) -> None:
        """Store the outputs of a turn."""
        for output in outputs:
            if isinstance(output, Reply):
                self.replies[output.id] = output
            elif isinstance(output, StepOutput):
                collect(self.collected, output)
                if output.stats is not None:
                    self.stats[output.stats.group] = output.stats

    def run(self, messages: Seq[Inbound] = (), most: int = 20_000) -> dict[int, Collected]:
        """Run turns until every rank is idle and return the outputs by sequence id.

        Raises:
            AssertionError: the ranks are not idle after ``most`` turns.
        """
        self.turn(messages)
        for _ in range(most):
            if self.idle:
                return self.collected
            self.turn()
        raise AssertionError(
            f"not idle after {most} turns: {[e.scheduler.load() for e in self.engines]}"
        )

    def control(self, action: str, **args: Any) -> Reply:
        """Send a Control and return rank 0's reply.

        Raises:
            AssertionError: the reply is an error.
        """
        self._controls += 1
        self.turn([Control(self._controls, action, args)])
        reply = self.replies[self._controls]
        assert reply.ok, reply.error
        return reply

    def check_idle(self) -> None:
        """Check every rank: integrity, all pages free or evictable, all rows free.

        Raises:
            AssertionError: a check failed (also CacheFault).
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
        """Close all ranks together, since collectives among processes may need that.

        Further calls do nothing.
        """
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
    """Plan, build, run ``messages`` to the end, and check that every page was freed.

    Without ``plugins``, the configuration may name components of installed distributions.

    Returns:
        The front's outputs by sequence id.
    """
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        collected = ranks.run(messages)
        ranks.check_idle()
        return collected
