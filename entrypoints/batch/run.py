"""Runs the requests of a batch, a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from glowplug.core.errors import EngineDead
from glowplug.entrypoints.batch.files import (
    BadLine,
    BatchRequest,
    OutputFile,
    error_line,
    response_line,
)
from glowplug.entrypoints.batch.local_app import LocalAnswer, LocalApp

logger = logging.getLogger("glowplug.batch")

RETRY_SECONDS = 0.2  #: pause after which a request is repeated if the engine's queue was full
QUEUE_FULL = 429  #: HTTP status of a request for which the engine's queue has no room
GOOD = 200  #: HTTP status of an answered request


@dataclass
class Totals:
    """Counts of a run.

    Attributes:
        answered: requests with status 200.
        failed: requests with another status, and malformed lines.
        skipped: requests that an earlier run had answered.
        interrupted: a signal ended the run early.
    """

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    interrupted: bool = False


class BatchRun:
    """A run of a batch.

    Args:
        app: the server's app.
        lines: the lines of the input file; read as requests finish.
        output: the output file.
        finished: called after each line of the output.
    """

    def __init__(
        self,
        app: LocalApp,
        lines: Iterator[BatchRequest | BadLine],
        output: OutputFile,
        finished: Callable[[], None],
    ) -> None:
        self.totals = Totals()
        self._app = app
        self._lines = lines
        self._output = output
        self._finished = finished
        self._workers: list[asyncio.Task[None]] = []

    async def run(self, in_flight: int, drain_seconds: float) -> Totals:
        """Run all requests, at most ``in_flight`` at a time, and return the counts.

        After a signal no further request begins, and those in flight have ``drain_seconds`` to
        finish. A second signal ends them at once.

        Raises:
            EngineDead: the engine has stopped.
        """
        self._workers = [asyncio.create_task(self._work()) for _ in range(in_flight)]
        try:
            with self._signals(drain_seconds):
                done, _ = await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if not task.cancelled():
                    task.result()
        finally:
            self._cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
        return self.totals

    def _cancel(self) -> None:
        for task in self._workers:
            task.cancel()

    async def _work(self) -> None:
        """Run one request after another until no line is left or a signal has arrived."""
        while not self.totals.interrupted:
            line = next(self._lines, None)
            if line is None:
                return
            if isinstance(line, BadLine):
                self._write(error_line(line), good=False)
            elif line.custom_id in self._output.answered:
                self.totals.skipped += 1
                self._finished()
            else:
                await self._answer(line)

    async def _answer(self, request: BatchRequest) -> None:
        """Run one request and write its line.

        Raises:
            EngineDead: the engine has stopped; nothing is written, so a resumed run repeats it.
        """
        answer = await self._unless_full(request)
        client = self._app.context.client
        if client.state == "dead":
            raise EngineDead(client.reason)
        line = response_line(request.custom_id, answer.status, answer.request_id, answer.body)
        self._write(line, good=answer.status == GOOD)

    async def _unless_full(self, request: BatchRequest) -> LocalAnswer:
        """Run a request, again while the engine's queue is full, and return the response."""
        while True:
            answer = await self._app.post(request.url, request.body)
            if answer.status != QUEUE_FULL:
                return answer
            await asyncio.sleep(RETRY_SECONDS)

    def _write(self, line: dict[str, Any], good: bool) -> None:
        self._output.write(line)
        self.totals.answered += good
        self.totals.failed += not good
        self._finished()

    @contextmanager
    def _signals(self, drain_seconds: float) -> Iterator[None]:
        """Call :meth:`_stop` on SIGTERM and SIGINT within the context."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop, drain_seconds)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self, drain_seconds: float) -> None:
        """Begin no further request; on a second signal end those in flight."""
        if self.totals.interrupted:
            self._cancel()
            return
        logger.warning("no further request begins; those in flight are finished")
        self.totals.interrupted = True
        asyncio.get_running_loop().call_later(drain_seconds, self._cancel)
