"""A driver of a scheduler and the fake model: the engine's loop, with checks after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixCache, Scheduler, SchedulingPolicy
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import Abort, Admitted, Finished, StepOutput
from glowplug.core.step.request import Admission, SamplingParams, Sequence
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.fake_model import FakeModel, PoisonedPages
from glowplug.core.testing.harness.simulated_tier import simulated_tier


def sequence(
    id: int,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    stop_ids: frozenset[int] = frozenset(),
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    timeout: float = 0.0,
    queue_timeout: float = 0.0,
    min_tokens: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Sequence:
    """Return a sequence as the engine makes it from a Submit."""
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=id,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Sequence(
        id=id,
        prompt=np.asarray(prompt, np.int32),
        params=params,
        admission=Admission(priority, salt, timeout, queue_timeout),
        arrival=arrival,
        stop_ids=stop_ids,
    )


@dataclass
class Collected:
    """The outputs that the front would have received for one sequence.

    Attributes:
        tokens: output tokens.
        counts: number of tokens of each step that yielded some.
        logprobs: log-probabilities of output tokens.
        prompt_logprobs: log-probabilities of prompt tokens.
        finished: the message of its end.
        admitted: the message of its admission.
    """

    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finished: Finished | None = None
    admitted: Admitted | None = None


def collect(seen: Mapping[int, Collected], output: StepOutput) -> None:
    """Add ``output`` to the collected outputs of its sequences.

    Raises:
        AssertionError: the output is one that no engine may return.
    """
    _collect_tokens(seen, output)
    for id, values in output.logprobs:
        seen[id].logprobs += values.token
    for id, values in output.prompt_logprobs:
        seen[id].prompt_logprobs += values.token
    for admitted in output.admitted:
        assert seen[admitted.id].admitted is None, f"sequence {admitted.id} is admitted twice"
        seen[admitted.id].admitted = admitted
    for finished in output.finished:
        assert seen[finished.id].finished is None, f"sequence {finished.id} ends twice"
        seen[finished.id].finished = finished


def _collect_tokens(seen: Mapping[int, Collected], output: StepOutput) -> None:
    counts = output.counts or [1] * len(output.ids)
    assert sum(counts) == len(output.tokens), "tokens and counts disagree"
    at = 0
    for id, count in zip(output.ids, counts, strict=True):
        assert count > 0 and seen[id].finished is None, f"sequence {id} yields tokens after its end"
        seen[id].tokens += output.tokens[at : at + count]
        seen[id].counts.append(count)
        at += count


class Drive:
    """A scheduler, a table, a poisoned pool and a fake model, stepped together.

    With a tier, freed pages keep their entries until the next step, as on a device; without one
    they are poisoned at once.

    Args:
        depth: number of steps that may be in flight when the next one is scheduled: 0 is no
            overlap, 1 the engine's depth.
        seed: seed of the fake model's drafts.
        bad: (sequence id, output length) at which the fake logits become NaN.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        plan: EnginePlan,
        cache: PrefixCache,
        policy: SchedulingPolicy,
        *,
        depth: int = 1,
        seed: int = 0,
        bad: tuple[int, int] | None = None,
    ) -> None:
        sizes = plan.sizes
        self.plan = plan
        self.scheduler = scheduler
        self.cache = cache
        self.depth = depth
        self.table = SequenceTable(sizes.max_running, sizes.positions, sizes.page_size)
        self.pages = PoisonedPages(sizes.num_pages)
        self.model = FakeModel(
            self.table,
            sizes.num_pages,
            vocab=plan.facts.model.vocab_size,
            width=sizes.width,
            seed=seed,
            bad=bad,
            depth=depth,
            lookahead=sizes.lookahead,
        )
        self.tier = simulated_tier(cache, plan, self.model, self.pages)
        scheduler.bind(self.table, self.pages, cache, policy)
        self.inflight: deque[tuple[Batch, StepResult]] = deque()
        self.seen: dict[int, Collected] = {}
        self.batches: list[Batch] = []

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the scheduler."""
        self.scheduler.add(sequence)
        self.seen[sequence.id] = Collected()

    def abort(self, *ids: int, reason: str = "abort") -> StepOutput | None:
        """Abort sequences and collect their outputs."""
        output = self.scheduler.abort(Abort(list(ids), reason))
        if output is not None:
            collect(self.seen, output)
        return output

    def step(self) -> bool:
        """Run one turn of the loop and its checks.

        Returns:
            False: every sequence has ended and nothing is in flight.
        """
        batch = self.scheduler.next_batch()
        assert batch is not None or self.inflight or not self._unfinished(), (
            "the scheduler stalls: no batch, although sequences wait and none is in flight"
        )
        if batch is not None:
            sizes = self.plan.sizes
            assert batch.num_tokens <= sizes.max_step_tokens, "more tokens than a step may hold"
            assert batch.num_tokens - batch.decode_tokens <= sizes.chunk_size, (
                "more prefill tokens than a chunk"
            )
            self.batches.append(batch)
            if self.tier is not None:
                self.tier.move()
            self.inflight.append((batch, self.model.launch(batch)))
        if self.inflight and (batch is None or len(self.inflight) > self.depth):
            collect(self.seen, self.scheduler.commit(*self.inflight.popleft()))
        pending = self.scheduler.take_pending()
        if pending is not None:
            collect(self.seen, pending)
        self.scheduler.check()
        return bool(self.inflight) or self._unfinished()

    def run(self, most: int = 20_000) -> None:
        """Step until idle, then check that no page or row has leaked.

        Raises:
            AssertionError: the scheduler is not idle after ``most`` steps, or a check failed.
        """
        for _ in range(most):
            if not self.step():
                break
        else:
            raise AssertionError(f"not idle after {most} steps: {self.scheduler.load()}")
        self.check_idle()

    def check_idle(self) -> None:
        """Check that every row is free, and every page is free or in the cache and evictable."""
        held, evictable = self.cache.size()
        assert self.pages.free + held == self.pages.total, "pages have leaked"
        assert held == evictable, "locks have leaked"
        assert self.table.free_rows == self.table.rows, "rows have leaked"
        stats = self.scheduler.load()
        assert (stats.running, stats.waiting) == (0, 0)

    def _unfinished(self) -> bool:
        """Return whether a sequence has not ended."""
        return any(seen.finished is None for seen in self.seen.values())
