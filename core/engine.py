"""The loop of one rank: take messages in, schedule, launch, commit the step before, hand tokens out.

With ``overlap`` the next step is launched before the last one is read: the sampled ids stay on the device and feed the
next step, and a sequence that turns out to have ended costs one surplus token, which commit drops. Without it each
step is committed at once. Both give the same tokens.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np

from glowplug.core.errors import RequestError
from glowplug.core.messages import Abort, Control, Finished, Inbound, Outbound, Reply, Stats, StepOutput, Submit
from glowplug.core.observe import StepTimer
from glowplug.core.protocols import Collectives, ParallelStrategy, Scheduler
from glowplug.core.request import Sequence
from glowplug.core.runner import InFlight, Runner

STATS_EVERY = 0.1  #: seconds between statistics while busy; they also follow every finish and every turn to idle

ControlHandler = Callable[[dict[str, Any]], dict[str, Any]]


class Engine:
    """One rank's engine. Not thread-safe: one thread calls ``receive`` and ``step``.

    ``controls`` maps a Control's action to its handler; ``observers`` are called after each committed step.
    """

    def __init__(self, *, scheduler: Scheduler, runner: Runner, parallel: ParallelStrategy, collectives: Collectives,
                 overlap: bool, observers: Seq[Any] = (), controls: dict[str, ControlHandler] | None = None) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.parallel, self.collectives = parallel, collectives
        self.overlap = overlap
        self.observers = tuple(observers)
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
            priority=message.priority, salt=message.salt, arrival=time.monotonic(),
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
        batch = self.scheduler.next_batch()
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

    def _commit(self, inflight: InFlight) -> StepOutput:
        result = inflight.wait()
        self._timer.done()
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
