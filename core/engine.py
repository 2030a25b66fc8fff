"""The loop of one rank: take messages in, schedule, launch, commit the step before, hand tokens out.

With ``overlap`` the next step is launched before the last one is read: the sampled ids stay on the device and feed the
next step, and a sequence that turns out to have ended costs one surplus token, which commit drops. Without it each
step is committed at once. Both give the same tokens.

Every rank runs this loop on the same messages and the same time, which rank 0 hands round at the start of a turn.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np

from glowplug.core.batch import Batch, idle_batch, shape_of
from glowplug.core.errors import RequestError
from glowplug.core.messages import (
    Abort,
    Control,
    Finished,
    Inbound,
    Outbound,
    Reply,
    Stats,
    StepOutput,
    Submit,
    Turn,
    decode_inbound,
    decode_turn,
    encode_turn,
)
from glowplug.core.observe import StepObserver, StepTimer
from glowplug.core.offers import Mode
from glowplug.core.parallel_stack import ParallelStack
from glowplug.core.protocols import Collectives, Scheduler
from glowplug.core.request import Sequence
from glowplug.core.runner import InFlight, Runner

STATS_EVERY = 0.1  #: seconds between statistics while busy; they also follow every finish and every turn to idle

ControlHandler = Callable[[dict[str, Any]], dict[str, Any]]


class RankClock:
    """Rank 0's time at the start of the loop's turn, in seconds. Deadlines read it, so that ranks decide alike."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class Engine:
    """One rank's engine. Not thread-safe: one thread calls ``turn``.

    Args:
        leads: this is rank 0, whose front's messages all ranks work on, and whose outputs count.
        observers: called after each committed step.
        controls: handlers by a Control's action.
        closing: called in order by ``close``.
    """

    def __init__(self, *, scheduler: Scheduler, runner: Runner, parallel: ParallelStack, collectives: Collectives,
                 overlap: bool, clock: RankClock, leads: bool = True, observers: Seq[StepObserver] = (),
                 controls: dict[str, ControlHandler] | None = None, closing: Seq[Callable[[], None]] = ()) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.parallel, self.collectives = parallel, collectives
        self.overlap, self.clock, self.leads = overlap, clock, leads
        self.observers, self._closing = tuple(observers), list(closing)
        self.controls = {"flush": self._flush, **(controls or {})}
        self._inflight: InFlight | None = None
        self._stats_due = 0.0
        self._timer = StepTimer()
        self._was_busy = False

    @property
    def idle(self) -> bool:
        """Nothing launched and nothing to schedule."""
        if self._inflight is not None:
            return False
        load = self.scheduler.load()
        return load.running == 0 and load.waiting == 0

    def turn(self, frames: Seq[bytes] = (), stop: bool = False) -> list[Outbound] | None:
        """One turn of the loop: take in, step, hand out. None: the front has gone, and every rank ends.

        ``frames`` and ``stop`` are what rank 0 heard from the front; other ranks leave them out and wait for rank 0.
        """
        own = encode_turn(Turn(time.monotonic(), list(frames), stop)) if self.leads else None
        turn = decode_turn(self.collectives.broadcast_bytes(own))
        if turn.stop:
            return None
        self.clock.now = turn.now
        found: list[Outbound] = []
        for frame in turn.frames:
            found.extend(self.receive(decode_inbound(frame)))
        found.extend(self.step())
        return found

    def close(self) -> None:
        """The rank ends: plugins hear of it, graphs and collectives go. Idempotent; one failure stops no other."""
        closing, self._closing = self._closing, []
        for end in closing:
            try:
                end()
            except Exception:
                logging.getLogger("glowplug").exception("while the engine was closed")

    # ---- in ---------------------------------------------------------------------------------------------------------

    def receive(self, messages: list[Inbound]) -> list[Outbound]:
        """Take in messages; returns what they cause at once (refusals, replies, ends of aborted sequences)."""
        answers: list[Outbound] = []
        for message in messages:
            answer = self._receive_one(message)
            if answer is not None:
                answers.append(answer)
        return answers

    def _receive_one(self, message: Inbound) -> Outbound | None:
        if isinstance(message, Submit):
            return self._submit(message)
        if isinstance(message, Abort):
            return self.scheduler.abort(message)
        return self._control(message)

    def _submit(self, message: Submit) -> StepOutput | None:
        sequence = Sequence(
            id=message.id, prompt=np.asarray(message.prompt, np.int32), params=message.params,
            priority=message.priority, salt=message.salt, arrival=self.clock(),
            stop_ids=frozenset(message.stop_ids), timeout=message.timeout, queue_timeout=message.queue_timeout,
        )
        try:
            self.scheduler.add(sequence)
        except RequestError as error:
            return StepOutput(finished=[Finished(message.id, "error", error=str(error), error_code=error.code)])
        return None

    def _control(self, message: Control) -> Reply:
        handler = self.controls.get(message.action)
        if handler is None:
            return Reply(message.id, False, error=f"unknown action {message.action!r}")
        try:
            return Reply(message.id, True, handler(message.args))
        except RequestError as error:
            return Reply(message.id, False, error=str(error))

    def _flush(self, args: dict[str, Any]) -> dict[str, Any]:
        if not self.scheduler.flush():
            raise RequestError("requests are running; the cache can be flushed only when idle")
        return {}

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Outbound]:
        """Launch at most one batch and commit at most one; returns what was committed."""
        batch = self._agreed(self.scheduler.next_batch())
        launched = None
        if batch is not None:
            self._timer.launch()
            launched = self.runner.launch(batch)
        outputs: list[Outbound] = []
        if self.overlap:
            due, self._inflight = self._inflight, launched
        else:
            due = launched
        if due is not None:
            outputs.append(self._commit(due))
        pending = self.scheduler.take_pending()
        if pending is not None:
            outputs.append(pending)
        self._attach_stats(outputs)
        return outputs

    def _agreed(self, batch: Batch | None) -> Batch | None:
        """Ranks that may differ agree on the step; one without work joins it with an idle batch."""
        shape = self.parallel.agree(shape_of(batch))
        if batch is None and shape.mode is not Mode.IDLE:
            batch = idle_batch()
        if batch is not None:
            batch.agreed = shape
        return batch

    def _commit(self, inflight: InFlight) -> StepOutput:
        result = inflight.wait()
        self._timer.done()
        if inflight.batch.mode is Mode.IDLE:
            return StepOutput()
        output = self.scheduler.commit(inflight.batch, result)
        for observer in self.observers:
            observer.step(inflight.batch, output)
        return output

    def _attach_stats(self, outputs: list[Outbound]) -> None:
        now = time.monotonic()
        busy = not self.idle
        turned_idle = self._was_busy and not busy
        self._was_busy = busy
        if not busy:
            self._timer.idle()
        if not turned_idle and now < self._stats_due:
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
        stats.step_seconds, stats.bubble_seconds = self._timer.step_seconds, self._timer.bubble_seconds
        return stats
