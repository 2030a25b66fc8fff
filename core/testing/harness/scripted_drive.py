"""A driver of a speculative algorithm: the real runner and scheduler around a scripted target."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from itertools import cycle
from typing import Any

import numpy as np

from glowplug.core.engine.runner import Runner
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import SpeculativeAlgorithm, Worker
from glowplug.core.step.batch import Batch, StepResult, idle_batch
from glowplug.core.step.messages import Abort
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.drive import Collected, collect
from glowplug.core.testing.harness.scripted_target import (
    PAGE,
    Script,
    ScriptedSampler,
    ScriptedTarget,
)
from glowplug.core.testing.harness.simple import FirstCome

IDLE_EVERY = 5  #: turns between steps without rows, in which a rank only helps others


class ScriptedDrive:
    """The loop of a rank. Every step's results are compared with the script.

    Args:
        algorithm: the algorithm, which has been reserved.
        plan: the plan; its pages have ``scripted_target.PAGE`` tokens.
        seed: seed of the script.
        depth: number of steps that may be in flight when the next one is scheduled.
        cached: whether requests share prefixes.
        sizes: sizes of drafts, not larger than the plan's, that steps have in turn; (): the plan's.
    """

    def __init__(
        self,
        algorithm: SpeculativeAlgorithm,
        plan: EnginePlan,
        *,
        seed: int = 0,
        depth: int = 1,
        cached: bool = True,
        sizes: Seq[DraftShape] = (),
    ) -> None:
        self._sizes = cycle(sizes) if sizes else None
        self._plan = plan
        assert plan.sizes.page_size == PAGE
        self.script = Script(seed)
        self.target = ScriptedTarget(self.script, plan.sizes.num_pages * PAGE)
        self.sampler = ScriptedSampler(self.target)
        self.table = SequenceTable(plan.sizes.max_running, plan.sizes.positions, PAGE)
        self.runner = self._runner(algorithm, plan)
        self.scheduler = self._scheduler(plan, "radix" if cached else "none")
        self.depth = depth
        self.seen: dict[int, Collected] = {}
        self.sequences: dict[int, Sequence] = {}
        self.counts: Counter[int] = Counter()  #: tokens that decoding rows gained per step
        self._inflight: deque[tuple[Batch, StepResult]] = deque()
        self._turns = 0

    def _runner(self, algorithm: SpeculativeAlgorithm, plan: EnginePlan) -> Runner:
        target: Any = self.target
        return Runner(
            model=target,
            attention=target,
            speculative=algorithm,
            sampler=self.sampler,
            graphs=make("graphs", "eager", plan, Worker()),
            table=self.table,
            device="cpu",
        )

    def _scheduler(self, plan: EnginePlan, cache: str) -> Any:
        made = make("scheduler", "continuous", plan, Worker())
        pages = PageAllocator(plan.sizes.num_pages)
        made.bind(self.table, pages, make("cache", cache, plan, Worker()), FirstCome())
        return made

    def add(self, sequence: Sequence) -> None:
        """Submit a request."""
        self.sequences[sequence.id] = sequence
        self.seen[sequence.id] = Collected()
        self.scheduler.add(sequence)

    def abort(self, id: int) -> None:
        """Abort a request, which may be in flight."""
        output = self.scheduler.abort(Abort([id]))
        if output is not None:
            collect(self.seen, output)

    def turn(self) -> bool:
        """Run one turn of the loop; return False once every request has ended."""
        self._turns += 1
        if self._turns % IDLE_EVERY == 0:
            self.runner.launch(idle_batch()).wait()
        batch = self.scheduler.next_batch()
        if batch is not None:
            self._resize(batch)
            self._inflight.append((batch, self._launch(batch)))
        if self._inflight and (batch is None or len(self._inflight) > self.depth):
            collect(self.seen, self.scheduler.commit(*self._inflight.popleft()))
        pending = self.scheduler.take_pending()
        if pending is not None:
            collect(self.seen, pending)
        self.scheduler.check()
        return bool(self._inflight) or any(one.finished is None for one in self.seen.values())

    def run(self, most: int = 5000) -> None:
        """Run to the end, and compare every answer with the script."""
        for _ in range(most):
            if not self.turn():
                break
        else:
            raise AssertionError(f"not idle after {most} turns")
        for id, sequence in self.sequences.items():
            text = sequence.prompt.tolist()
            for token in self.seen[id].tokens:
                assert token == self.script.following(tuple(text)), f"request {id}: another token"
                text.append(token)
            ended = self.seen[id].finished
            assert ended is not None and ended.reason in ("length", "abort"), ended
            if ended.reason == "length":
                most_tokens = min(sequence.max_length, self._plan.sizes.context_length)
                assert len(text) == most_tokens, f"request {id} ends early or late"

    def _resize(self, batch: Batch) -> None:
        """Give the decoding rows of a step drafts of the next of the sizes."""
        if self._sizes is None or not batch.num_decodes:
            return
        sizes = self._plan.sizes
        batch.draft_shape = shape = next(self._sizes)
        rows = batch.rows[: batch.num_decodes]
        self.table.launched[rows] -= np.int32(sizes.width - shape.tokens)
        batch.query_lens[: len(rows)] = shape.tokens
        most = np.int32(sizes.context_length + shape.tokens)
        batch.kv_lens[: len(rows)] = np.minimum(self.table.launched[rows], most)

    def _launch(self, batch: Batch) -> StepResult:
        """Run a step and compare what its rows gain with the script."""
        self._change_owners(batch)
        self.sampler.observed = {}
        result = self.runner.launch(batch).wait()
        stops = np.cumsum(batch.query_lens)
        for place, row in enumerate(batch.rows.tolist()):
            gained = result.tokens[place, : result.counts[place]].tolist()
            assert self.sampler.observed.get(row, []) == gained, "the sampler observed other tokens"
            if row in self.target.truth:
                decodes = place < batch.num_decodes
                root = int(stops[place]) - (int(batch.query_lens[place]) if decodes else 1)
                wanted = self.target.gained(root) if batch.samples[place] else []
                assert gained == wanted, f"row {row} gains {gained}, the script has {wanted}"
                self._note(row, gained, decodes)
        return result

    def _change_owners(self, batch: Batch) -> None:
        """Set the texts of rows that sequences have entered, and forget those of left rows."""
        truth = self.target.truth
        for row in batch.left:
            truth.pop(row, None)
        for sequence in batch.joined:
            if sequence.row >= 0:
                truth[sequence.row] = sequence.all_tokens().tolist()

    def _note(self, row: int, gained: list[int], decodes: bool) -> None:
        """Add the tokens that a row gained to its text.

        NOTE: the text of an ended row is forgotten, because its surplus steps may read the scratch
        page.
        """
        text = self.target.truth[row]
        text += gained
        if decodes:
            self.counts[len(gained)] += 1
        if len(text) >= self.table.max_length[row]:
            del self.target.truth[row]
