"""The sequences of one HTTP request.

They run together, their deltas are merged into one stream and measured, and they are aborted
together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from glowplug.core.errors import EngineDead
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.front.front import CheckedRequest
from glowplug.entrypoints.server.errors import from_delta
from glowplug.entrypoints.server.metrics import Metrics
from glowplug.entrypoints.server.request_log import RequestRecord


class JobContext(Protocol):
    """The part of the server's context that a :class:`Job` uses."""

    client: EngineClient
    metrics: Metrics
    jobs: Jobs

    def require_ready(self) -> None: ...


@dataclass
class Job:
    """The sequences of one HTTP request.

    Attributes:
        rid: id of the request.
        sequences: prompt and sampling parameters of each sequence.
        admission: priority, prefix-cache salt and limits in time of all sequences.
        rids: ids of the sequences; None: the client did not give one for each.
        n: number of consecutive sequences that share a prompt.
        record: record in the request log; None: the job was not started by a client.
        started: time of arrival, seconds (monotonic).
        output_tokens: tokens received so far, of all sequences.
    """

    rid: str
    sequences: list[CheckedRequest]
    admission: Admission = DEFAULT_ADMISSION
    rids: list[str] | None = None
    n: int = 1
    record: RequestRecord | None = None
    started: float = field(default_factory=time.monotonic)
    output_tokens: int = 0

    async def run(self, context: JobContext) -> AsyncGenerator[tuple[int, Delta], None]:
        """Run all sequences and yield (index of the sequence, delta) in the order of arrival.

        Closing the generator aborts the sequences that still run.

        Raises:
            RequestError: a sequence failed or timed out.
            EngineDead: the engine has stopped.
            Unavailable: the server accepts no new work.
        """
        context.require_ready()
        with context.jobs.holding(self):
            source = (
                self._sequence(context, 0) if len(self.sequences) == 1 else self._merged(context)
            )
            async with aclosing(source):
                async for item in source:
                    yield item

    async def _sequence(
        self, context: JobContext, index: int
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Run one sequence and yield (``index``, delta) for each of its deltas."""
        meter = Meter(context.metrics, self.sequences[index].params, self.record)
        last: Delta | None = None
        source = context.client.generate(
            self.sequences[index],
            request_id=self.rids[index] if self.rids else self.rid,
            admission=self.admission,
        )
        try:
            async with aclosing(source):  # type: ignore[type-var]
                async for last in source:
                    meter.observe(last)
                    self.output_tokens += len(last.token_ids)
                    error = from_delta(last) if last.finish_reason is not None else None
                    if error is not None:
                        raise error
                    yield index, last
                    if last.finish_reason is not None:
                        return
        finally:
            if last is not None and self.record is not None:
                self.record.end_sequence(index // self.n, last)
        raise EngineDead("the engine ended a sequence without a reason")

    async def _merged(self, context: JobContext) -> AsyncGenerator[tuple[int, Delta], None]:
        """Run each sequence in a task of its own and yield (index of the sequence, delta)."""
        queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(
            maxsize=4 * len(self.sequences)
        )

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._sequence(context, index)) as source:
                    async for item in source:
                        await queue.put(item)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self.sequences))]
        try:
            live = len(tasks)
            while live:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                live -= item[1].finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Jobs:
    """The jobs in flight. Draining waits until there is none."""

    def __init__(self) -> None:
        self._held: dict[int, Job] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Number of jobs in flight."""
        return len(self._held)

    def oldest(self, most: int) -> list[Job]:
        """Return up to ``most`` jobs in flight, in the order of their arrival."""
        return list(islice(self._held.values(), most))

    @contextmanager
    def holding(self, job: Job) -> Iterator[None]:
        """Hold ``job`` as one in flight within the context."""
        self._held[id(job)] = job
        self._idle.clear()
        try:
            yield
        finally:
            del self._held[id(job)]
            if not self._held:
                self._idle.set()

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no job runs. Return False if some still run after ``seconds``."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


class Meter:
    """The recorder of one sequence's times and token counts in the server's metrics.

    The time of the request's first token is also stored in ``record``, the request's log record.
    """

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "_record", "_tokens")

    def __init__(
        self, metrics: Metrics, params: SamplingParams, record: RequestRecord | None
    ) -> None:
        self._metrics = metrics
        self._record = record
        self._arrival = time.monotonic()
        self._first = 0.0
        self._last = 0.0
        self._tokens = 0
        if params.max_tokens is not None:
            metrics.max_tokens.observe(params.max_tokens)

    def observe(self, delta: Delta) -> None:
        """Record the sequence's next delta in the metrics: its time and its number of tokens.

        With the last delta the sequence's totals are recorded too.
        """
        count = len(delta.token_ids)
        if count:
            now = time.monotonic()
            if self._tokens:
                self._metrics.itl.observe((now - self._last) / count)
            else:
                self._first = now
                if self._record is not None and self._record.first is None:
                    self._record.first = now
                self._metrics.ttft.observe(now - self._arrival)
            self._last = now
            self._tokens += count
            self._metrics.output_tokens.inc(count)
        if delta.finish_reason is not None:
            self._finish(delta)

    def _finish(self, delta: Delta) -> None:
        """Record the times and token counts of a sequence that has ended in the metrics."""
        metrics = self._metrics
        metrics.e2e.observe(time.monotonic() - self._arrival)
        metrics.phases(delta.times)
        metrics.prompt_length.observe(delta.prompt_tokens)
        metrics.output_length.observe(self._tokens)
        metrics.prompt_tokens.inc(delta.prompt_tokens)
        metrics.cached_tokens.inc(delta.cached_tokens)
        metrics.sequences.inc()
        metrics.success.inc(labels=(delta.finish_reason or "",))
        if self._tokens > 1:
            metrics.tpot.observe((self._last - self._first) / (self._tokens - 1))
