"""The loop of one rank: receive messages, schedule, launch, commit the previous step, send tokens.

With ``overlap`` the next step is launched before the results of the previous one are read: the
sampled ids stay on the device and are the next step's input. A sequence that turns out to have
ended then costs one surplus token, which the commit drops. Without ``overlap`` each step is
committed at once. Both give the same tokens.

Every rank runs this loop on the same messages and the same time, which rank 0 broadcasts at the
start of a turn. With a request router, ranks form groups, and each group has its own schedule: a
sequence is added by the ranks of its group only, and one rank of each group reports. All ranks
agree on the step exactly once in every turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from glowplug.core.engine.controls import ControlHandler, RankControls
from glowplug.core.engine.faults.ranks import ContainedFaults, check_exchanges
from glowplug.core.engine.in_flight import InFlight
from glowplug.core.engine.intake import Intake
from glowplug.core.engine.observe import StepMeters, StepObserver
from glowplug.core.engine.runner import Runner
from glowplug.core.engine.stalls import Stall, StallWatch
from glowplug.core.errors import GlowplugError, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.modes import Mode
from glowplug.core.protocols import AdaptiveScheduler, Collectives, Scheduler
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.step.batch import Batch, StepShape, idle_batch, shape_of
from glowplug.core.step.messages import (
    Abort,
    Inbound,
    Outbound,
    Stats,
    StepOutput,
    Submit,
    Turn,
    decode_inbound,
    decode_turn,
    encode_turn,
)

logger = logging.getLogger("glowplug.engine")

#: seconds between statistics while busy; they are also sent when the group becomes idle
STATS_EVERY = 0.1


class RankClock:
    """Rank 0's monotonic time at the start of the current turn, in seconds.

    Deadlines use it, so that all ranks decide alike.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class Engine:
    """One rank's engine. Not thread-safe: one thread calls ``turn``.

    Args:
        scheduler: the scheduler of this rank's group.
        runner: runs the batches.
        parallel: the rank's parallel strategies; they have the request router and agree on steps.
        collectives: the collectives over all ranks.
        plan: the plan; its ``overlap`` launches a step before the previous one's results are read.
        clock: the common time of the ranks; each turn sets it.
        stalls: finds requests that a component would hold for ever.
        ranks: number of ranks that run this loop together.
        leads: True on rank 0, which receives the front end's messages for all ranks and replies to
            Controls.
        observers: called after each committed step.
        controls: handler by action of a Control.
        closing: called in order by ``close``.

    Attributes:
        sends_outputs: this rank sends the outputs of its group's sequences to the front end. True
            on rank 0, or with groups on the leader of each group.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        parallel: ParallelStack,
        collectives: Collectives,
        plan: EnginePlan,
        clock: RankClock,
        stalls: StallWatch,
        ranks: int = 1,
        leads: bool = True,
        observers: Seq[StepObserver] = (),
        controls: Mapping[str, ControlHandler] | None = None,
        closing: Seq[Callable[[], None]] = (),
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.parallel = parallel
        self.collectives = collectives
        self.overlap = plan.overlap
        self.clock = clock
        self.leads = leads
        self.observers = tuple(observers)
        self._closing = list(closing)
        self.controls = RankControls({"flush": self._flush, **(controls or {})}, collectives, ranks)
        self._router = parallel.router()
        self.sends_outputs = leads if self._router is None else self._router.leads
        self._load = 0  # sequences of all groups at the last agreement; 0 without groups
        self._inflight: InFlight | None = None
        self._stats_due = 0.0
        self._stalls = stalls
        self._meters = StepMeters(plan, runner.table)
        self._was_busy = False

    @cached_property
    def _intake(self) -> Intake:
        return Intake(
            self.scheduler,
            self._router,
            self.clock,
            self._stalls,
            self.runner.grammars,
            self.leads,
        )

    @cached_property
    def _faults(self) -> ContainedFaults:
        return ContainedFaults(self._router, self.leads)

    @property
    def idle(self) -> bool:
        """No group has a step in flight or a sequence to schedule, and none waits for a grammar.

        NOTE: ranks launch together or not at all. Without a step in flight here, no rank has one.
        """
        return self._steps_idle and not self.runner.grammars.holds

    @property
    def _steps_idle(self) -> bool:
        """No group has a step in flight or a sequence to schedule."""
        return self._inflight is None and not self._load and self._group_idle

    @property
    def _launched(self) -> bool:
        """A step of this group is in flight; idle steps beside other groups do not count."""
        return self._inflight is not None and self._inflight.batch.mode is not Mode.IDLE

    @property
    def _group_idle(self) -> bool:
        """This group has no step in flight and no sequence to schedule."""
        if self._launched:
            return False
        load = self.scheduler.load()
        return load.running == 0 and load.waiting == 0

    def turn(self, frames: Seq[bytes] = (), stop: bool = False) -> list[Outbound] | None:
        """Run one turn of the loop: receive messages, step, and return the outputs.

        Other ranks than rank 0 leave out the arguments and wait for rank 0.

        Args:
            frames: the front end's messages.
            stop: True: the front end has gone.

        Returns:
            The messages of this rank to the front end, [] unless it ``sends_outputs``; None
            if the front end has gone and every rank must leave its loop.
        """
        try:
            return self._turn(frames, stop)
        except GlowplugError as error:
            self._faults.raise_with_cause(error)
            raise

    def _turn(self, frames: Seq[bytes], stop: bool) -> list[Outbound] | None:
        own = encode_turn(self._own_turn(frames, stop)) if self.leads else None
        turn = decode_turn(self.collectives.broadcast_bytes(own))
        if turn.stop:
            return None
        self.clock.now = turn.now
        self._faults.compare(turn.failed)
        released = self._intake.release(turn.grammars)
        found: list[Outbound] = [end for end in released if self._note_ends(end)]
        for frame in turn.frames:
            found.extend(self.receive(decode_inbound(frame)))
        found.extend(self.step())
        return found if self.sends_outputs else []

    def _own_turn(self, frames: Seq[bytes], stop: bool) -> Turn:
        grammars = self.runner.grammars
        ready = grammars.ready()
        if grammars.holds and not ready and not frames and self._steps_idle:
            grammars.pause()
        return Turn(time.monotonic(), list(frames), stop, ready, self._faults.noted)

    def close(self) -> None:
        """Notify plugins of the rank's end, and free graphs and collectives. Idempotent.

        A failure is logged, and the remaining callbacks still run.
        """
        closing = self._closing
        self._closing = []
        for end in closing:
            try:
                end()
            except Exception:
                logger.exception("a callback failed while the engine was closed")

    # ---- messages --------------------------------------------------------------------------------

    def receive(self, messages: list[Inbound]) -> list[Outbound]:
        """Process the front end's messages of one turn.

        Returns:
            The immediate outputs: refusals, replies, ends of aborted sequences.
        """
        replies: list[Outbound] = []
        for message in messages:
            reply = self._receive_one(message)
            if reply is not None:
                replies.append(reply)
        return replies

    def _receive_one(self, message: Inbound) -> Outbound | None:
        if isinstance(message, Submit):
            return self._note_ends(self._intake.submit(message))
        if isinstance(message, Abort):
            return self._note_ends(self._intake.abort(message))
        reply = self.controls.handle(message)
        return reply if self.leads else None

    def _note_ends(self, output: StepOutput | None) -> StepOutput | None:
        """Note the sequences that ``output`` ends, and return ``output``."""
        if output is not None and output.finished:
            self._stalls.ended(output.finished)
            self._faults.note(output.finished)
        return output

    def _flush(self, args: dict[str, Any]) -> dict[str, Any]:
        """Drop the prefix cache on all ranks, or refuse on all ranks if any group is busy."""
        idle = self.scheduler.load().running == 0
        if not self.controls.everywhere(idle) or not self.scheduler.flush():
            raise RequestError("requests are running; the cache can be flushed only when idle")
        if self._router is not None:
            self._router.forget_prefixes()
        if self.runner.tier is not None:
            self.runner.tier.forget()
        return {}

    # ---- one step --------------------------------------------------------------------------------

    def step(self) -> list[Outbound]:
        """Launch at most one batch, commit at most one, and return the outputs."""
        outputs: list[Outbound] = []
        batch = self._agreed(self._next_batch(outputs))
        launched = None
        if batch is not None:
            self._meters.launch(batch)
            launched = self.runner.launch(batch)
            unsampled = self.runner.sampler_rows.failed
            failed = self._note_ends(self._intake.end_failed(unsampled))
            if failed is not None:
                outputs.append(failed)
        if self.overlap:
            due = self._inflight
            self._inflight = launched
        else:
            due = launched
        if due is not None:
            outputs.extend(self._commit(due))
        pending = self._note_ends(self.scheduler.take_pending())
        if pending is not None:
            outputs.append(pending)
        if self.sends_outputs:
            self._attach_stats(outputs)
        return outputs

    def _next_batch(self, outputs: list[Outbound]) -> Batch | None:
        """Return the scheduler's next step; None if there is nothing to launch now.

        If the scheduler launches nothing for too long although it has sequences, they are ended;
        their ends are appended to ``outputs``. Nothing is launched after a fault in this turn.
        """
        if self._faults.noted:
            return None
        batch = self.scheduler.next_batch()
        if batch is not None or self._launched:
            self._stalls.moved()
            return batch
        load = self.scheduler.load()
        if load.running or load.waiting:
            self._end_stalled(self._stalls.still(self.clock(), load), outputs)
        else:
            self._stalls.moved()
        return None

    def _end_stalled(self, stall: Stall | None, outputs: list[Outbound]) -> None:
        """End the sequences of ``stall`` with its reason.

        Sequences that the scheduler has lost are ended too.
        """
        if stall is None:
            return
        output = stall.ends(self.scheduler.abort(Abort(stall.ids, "error")))
        self._note_ends(output)
        outputs.append(output)
        if self.sends_outputs:
            count = len(output.finished)
            logger.error("%d request%s ended: %s", count, "" if count == 1 else "s", stall.reason)

    def _agreed(self, batch: Batch | None) -> Batch | None:
        """Agree with the other ranks on the step and return this rank's batch.

        A rank without work gets an idle batch if another rank has work, else None.
        """
        own = shape_of(batch)
        shape = self.parallel.agree(own if self._router is None else self._with_load(own))
        self._load = shape.load
        if batch is None and shape.mode is not Mode.IDLE:
            batch = idle_batch()
        if batch is not None:
            batch.agreed = shape
            if shape.draft_shape not in (None, batch.draft_shape):
                if batch.num_decodes:
                    cast(AdaptiveScheduler, self.scheduler).widen(batch, shape.draft_shape)
                batch.draft_shape = shape.draft_shape
        return batch

    def _with_load(self, shape: StepShape) -> StepShape:
        """Return ``shape`` with the load of this group."""
        load = self.scheduler.load()
        free = load.pages_free + load.pages_evictable
        return replace(
            shape,
            load=load.running + load.waiting,
            pending=load.pending_tokens,
            context=(load.pages_total - free) * load.page_size,
            free=free * load.page_size,
            failed=self._faults.count,
        )

    def _commit(self, inflight: InFlight) -> list[Outbound]:
        """Wait for a step, commit it, and return its outputs; an idle step has none."""
        result = inflight.wait()
        check_exchanges(self.collectives)
        measured = self._meters.done(inflight, result)
        if measured is None:
            return []
        output = self.scheduler.commit(inflight.batch, result)
        measured.add_to(output)
        self._note_ends(output)
        for observer in self.observers:
            observer.step(inflight.batch, output)
        outputs: list[Outbound] = [output]
        self._end_stalled(self._stalls.stepped(inflight.batch, result, output), outputs)
        return outputs

    def _attach_stats(self, outputs: list[Outbound]) -> None:
        """Attach the statistics when they are due, and when the last sequence has ended."""
        now = time.monotonic()
        busy = not self._group_idle
        turned_idle = self._was_busy and not busy
        self._was_busy = busy
        if not busy:
            self._meters.idle(self._load == 0)
        # with overlap, a step is still in flight when the last sequence ends
        ended = not self._stalls.live and any(
            isinstance(one, StepOutput) and one.finished for one in outputs
        )
        if not turned_idle and not ended and now < self._stats_due:
            return
        self._stats_due = now + STATS_EVERY
        stats = self._stats()
        last = outputs[-1] if outputs else None
        if isinstance(last, StepOutput):
            last.stats = stats
        else:
            outputs.append(StepOutput(stats=stats))

    def _stats(self) -> Stats:
        stats = self.scheduler.load()
        self._meters.fill(stats)
        if self.runner.tier is not None:
            self.runner.tier.fill(stats)
        masks = self.runner.grammars.masks
        if masks is not None:
            masks.counts.fill(stats)
        stats.group = 0 if self._router is None else self._router.group
        return stats
