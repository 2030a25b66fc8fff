"""Iteration-level batching (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024).

A sequence waits in the queue, runs in a row of the table (prefilling, then decoding), and ends; or
it is preempted and waits again, at the queue's head, with its output. Invariants:

1. ``length`` counts committed tokens and changes in ``commit``; ``launched`` counts tokens whose KV
   a launched step writes and changes in ``next_batch``. Between commits ``launched`` is an upper
   bound when the width is above one: the number of accepted drafts is only on the device. With
   nothing in flight a decoding row has ``launched == length - 1``: its last token has been sampled
   but not been an input.
2. A decoding row's next input is on the device, so the row may be launched again before its token
   is committed. It is not launched when the steps in flight will fill it to ``max_length`` even at
   one token each.
3. The device runs steps in launch order. Therefore the pages of an ended row may be given to
   another row at once: a step in flight may still write to them, but the new owner is launched
   later and writes each KV slot before it reads it. Such a late step never touches a page that went
   into the prefix cache: it writes at ``length - 1`` and beyond, and only whole pages before that
   are kept. Likewise a row may have a new owner while a step of the old one is in flight.
4. A result belongs to a row only if the row's epoch is that of the launch; ``join`` and ``leave``
   change the epoch.
5. Pages are reserved before a launch: a prompt's at its admission, a decoding row's when the step's
   upper bound reaches a new page, and never beyond ``max_length - 1`` tokens, the last that are
   stored. Both include the ``lookahead`` tokens that a draft writes after a step's own. A width
   above one may compute positions beyond that; their page-table entries are 0, the scratch page,
   and their results are dropped. Trees are the exception: their branches are stored one behind the
   other, so rows have pages for all of them.
6. When pages run out, the cache first evicts its least recently used pages, then the policy names
   victims. Preemption happens only with nothing in flight (``next_batch`` returns None until then),
   so it never drops a token: a decoding row has gained at least one token since its admission, and
   the last running row is never a victim and always fits (``add`` refuses sequences that cannot).
   Hence every preemption is paid for by progress, and there is no livelock.
7. Pages that a match has in a tier are restored to pages taken at the admission. They belong to the
   cache at once and may be shared or evicted again before a step has run: copies precede the next
   step in the order of the decisions.
8. A recomputed sequence prefills prompt and output; its positions, and the seeds made from them, do
   not change.

Deadlines use ``Worker.clock`` (seconds, monotonic, the base of ``Sequence.arrival``), the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from glowplug.core.errors import QueueFull, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import DraftPolicy, PrefixCache, SchedulingPolicy, Worker
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import Abort, Admitted, Finished, Stats, StepOutput
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.request import Sequence
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.plugins.scheduler import continuous_batch, continuous_commit
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.scheduler.continuous_admission import Admitter
from glowplug.plugins.scheduler.continuous_checks import check_pages, check_size
from glowplug.plugins.scheduler.continuous_decodes import NO_ROWS, Decodes
from glowplug.plugins.scheduler.continuous_ends import SequenceEnds
from glowplug.plugins.scheduler.continuous_faults import Faults, SequencesFailed
from glowplug.plugins.scheduler.continuous_policy import PolicyCalls
from glowplug.plugins.scheduler.continuous_queue import Queue
from glowplug.plugins.scheduler.continuous_rows import Rows
from glowplug.plugins.scheduler.continuous_stats import count_step, snapshot


class Continuous:
    """``Scheduler`` with continuous batching. Call ``bind`` first; use it from one thread only."""

    def __init__(
        self,
        options: ContinuousOptions,
        plan: EnginePlan,
        worker: Worker,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.options = options
        self.sizes = plan.sizes
        self.clock = clock or worker.clock
        self.stats = Stats(page_size=plan.sizes.page_size)
        self._inflight = 0
        self._committed = 0  # number of the last committed step
        self._out = StepOutput()
        self._faults = Faults(plan)

    def bind(
        self,
        table: SequenceTable,
        pages: PageAllocator,
        cache: PrefixCache,
        policy: SchedulingPolicy,
    ) -> None:
        sizes = self.sizes
        if sizes.max_step_tokens < sizes.width:
            raise ValueError(
                f"a step of {sizes.max_step_tokens} tokens cannot hold a row of width {sizes.width}"
            )
        self.table = table
        self.pages = pages
        self.cache = cache
        self.policy = policy
        self.rows = Rows(table, pages, cache, self._faults)
        self.decodes = Decodes(self.rows, pages, sizes, self.clock)
        self.queue = Queue()
        self.scores = continuous_commit.PromptScores()
        self.max_rows = min(sizes.max_running, table.rows, sizes.max_step_tokens // sizes.width)
        self.admission = self._admitter(policy)
        self.calls = PolicyCalls(policy, self.rows, self.admission, self.stats)
        self.ends = SequenceEnds(self.rows, self.admission, self.scores, self.stats)
        self.stats.pages_total = pages.total

    def _admitter(self, policy: SchedulingPolicy) -> Admitter:
        return Admitter(
            self.rows,
            self.queue,
            policy,
            max_rows=self.max_rows,
            context=self.sizes.context_length,
            lookahead=self.sizes.lookahead,
            share=self.options.share_prefill,
            scored=self._is_scored,
            clock=self.clock,
        )

    # ---- requests --------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        check_size(sequence, self.rows, self.sizes.context_length)
        # NOTE: loads are known from the last agreement, so a group may hold more than its share for
        # a moment; the front keeps the limit of the engine
        alone = self.sizes.groups == 1
        most = self.max_rows + self.sizes.max_queued if alone else self.sizes.max_admitted
        if len(self.queue) + len(self.rows.running) >= most:
            raise QueueFull(
                f"the queue is full: {len(self.rows.running)} sequences are running and "
                f"{len(self.queue)} waiting"
            )
        if sequence.id in self.queue or self.ends.row_of(sequence.id) is not None:
            raise RequestError(f"sequence {sequence.id} exists already", code="duplicate_id")
        self.calls.hold(sequence)
        self.queue.add(sequence)
        self.admission.retry()

    def abort(self, message: Abort) -> StepOutput | None:
        ends = [self.ends.end(Finished(id, message.reason)) for id in message.ids]
        output = StepOutput(finished=[end for end in ends if end is not None])
        self.ends.check_accounts()
        return output if output.finished else None

    def expire(self) -> None:
        """End sequences past their deadline, and those that the policy rejects.

        ``commit`` or ``take_pending`` reports them.
        """
        for id, error in self.calls.rejected():
            end = self.ends.end(Finished(id, "error", None, str(error), error.code))
            self._out.finished += [end] if end is not None else []
        self._out.finished += self.ends.overdue(self.clock())

    # ---- a step ----------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        try:
            self.expire()
            # NOTE: nothing is launched after a fault, see ``Scheduler.next_batch``
            batch = self._next_batch() if self._faults.last is None else None
        except SequencesFailed:
            batch = None
            self._out.finished += self.ends.failed()
        self.ends.check_accounts()
        return batch

    def _next_batch(self) -> Batch | None:
        if not self.calls.make_room(self._inflight):
            return None
        decodes = self.decodes
        decodes.clear()
        kv_lens = NO_ROWS
        chunks: list[continuous_batch.Chunk] = []
        if not self.options.mixed:
            chunks = self._launch_chunks(0)
        if not chunks:
            preempted = self._reserve_decodes()
            if preempted is None:
                return None
            if self.options.mixed:
                chunks = self._launch_chunks(decodes.tokens, admit=not preempted)
            # NOTE: launched after the chunks: rows that end their prompt decode in the next step.
            kv_lens = decodes.launch()
        if not len(decodes.members) and not chunks:
            return None
        self._inflight += 1
        self.stats.steps += 1
        batch = continuous_batch.build(
            self.rows,
            self.stats.steps,
            decodes.members,
            decodes.shape.tokens,
            kv_lens,
            chunks,
            self.sizes.lookahead,
        )
        decodes.launched(batch)
        return batch

    def adapt(self, policy: DraftPolicy) -> None:
        self.decodes.policy = policy

    def widen(self, batch: Batch, shape: DraftShape) -> None:
        self.decodes.widen(batch, shape)

    def _reserve_decodes(self) -> bool | None:
        """Reserve pages for the next step of the decoding rows, and preempt rows if necessary.

        Returns:
            True if a row was preempted; None if steps in flight have to be committed before a row
            can be preempted.
        """
        preempted = False
        while not self.decodes.reserve():
            if self._inflight:
                return None
            self.calls.preempt()
            preempted = True
        return preempted

    def _launch_chunks(
        self, decode_tokens: int, admit: bool = True
    ) -> list[continuous_batch.Chunk]:
        """Take chunks of the prompts that have begun, then admit sequences and take their chunks.

        All chunks together have at most ``chunk_size`` tokens, and fit beside ``decode_tokens`` in
        the step. ``admit``: False: take no new sequences.
        """
        budget = min(self.sizes.chunk_size, self.sizes.max_step_tokens - decode_tokens)
        under_way = list(self.rows.prefilling)
        left = self.rows.unlaunched()
        if admit:
            for sequence in self.admission.admit(budget - left):
                self._note_admitted(sequence)
                under_way.append(sequence.row)
        return continuous_batch.launch_chunks(self.rows, budget, under_way) if under_way else []

    def _note_admitted(self, sequence: Sequence) -> None:
        """Count and report a sequence's first admission; ignore those after preemptions."""
        if sequence.preemptions:
            return
        sequence.cached_tokens = int(self.table.launched[sequence.row])
        self.stats.prompt_tokens += len(sequence.prompt)
        self.stats.cached_tokens += sequence.cached_tokens
        if self.admission.looks_up(sequence):
            self.stats.prefix_query_tokens += len(sequence.prompt)
            self.stats.prefix_hit_tokens += sequence.cached_tokens
        queued = max(0.0, self.clock() - sequence.arrival)
        self._out.admitted.append(Admitted(sequence.id, queued, sequence.cached_tokens))

    # ---- results ---------------------------------------------------------------------------------

    def commit(self, batch: Batch, result: StepResult) -> StepOutput:
        assert batch.step > self._committed, (
            f"step {batch.step} after {self._committed}: commit in launch order"
        )
        self._committed = batch.step
        self._inflight -= 1
        done = continuous_commit.append(self.rows, batch, result)
        output = self._out
        self._out = StepOutput()
        continuous_commit.report(self.rows, done, result, output)
        if result.prompt_logprobs:
            self.scores.report(self.rows, batch, result.prompt_logprobs, output)
        count_step(self.stats, done)
        self.decodes.committed(batch, done, result)
        self._publish(batch, done)
        if done.done.any():
            self._finish(done, output)
        if self._faults.last is not None:
            output.finished += self.ends.failed()
            self.ends.check_accounts()
        return output

    def _publish(self, batch: Batch, done: continuous_commit.Committed) -> None:
        """Put the prompts that ``batch`` completed into the prefix cache.

        The prompts of rows that ended are left to ``Rows.release``.
        """
        if batch.num_decodes == batch.num_rows:
            return
        first = int(np.searchsorted(done.at, batch.num_decodes))
        for i in range(first, len(done.at)):
            if not done.done[i]:
                self.rows.publish(int(done.rows[i]))
        if first < len(done.at):
            self.admission.retry()

    def _finish(self, done: continuous_commit.Committed, output: StepOutput) -> None:
        for i in np.flatnonzero(done.done).tolist():
            end = continuous_commit.finish_of(self.rows, done, i)
            self.rows.release(int(done.rows[i]), keep=not done.bad[i])
            output.finished.append(self.ends.counted(end))
        self.admission.retry()

    def take_pending(self) -> StepOutput | None:
        if not self._out.finished and not self._out.admitted:
            return None
        output = self._out
        self._out = StepOutput()
        return output

    # ---- state -----------------------------------------------------------------------------------

    def _is_scored(self, sequence: Sequence) -> bool:
        """Return True if requested prompt log-probabilities of ``sequence`` are not sent yet."""
        return sequence.params.prompt_logprobs is not None and not self.scores.complete(
            sequence.id, len(sequence.prompt)
        )

    def load(self) -> Stats:
        """Return a copy of the statistics with the current load; see ``snapshot``."""
        return snapshot(self.stats, self.rows, self.queue, self.admission)

    def flush(self) -> bool:
        if self.rows.running:
            return False
        # NOTE: a step in flight is stale now: its results are dropped, and the device runs it
        # before any later step.
        self.pages.give(self.cache.evict(self.cache.size()[1]))
        return True

    def check(self) -> dict[str, int]:
        """Check that each KV page has one owner; return the number of pages by kind of owner."""
        return check_pages(self.rows)
