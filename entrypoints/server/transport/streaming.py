"""Responses that end when the client disconnects.

Streams also end when the client stops reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glowplug.core.errors import EngineDead, RequestError
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.errors import from_exception
from glowplug.entrypoints.server.metrics import Metrics
from glowplug.entrypoints.server.request_log import CLIENT_CLOSED, RECORD, RequestRecord

logger = logging.getLogger("glowplug.server")

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(value: object) -> bytes:
    """Return the bytes of one server-sent event with ``value`` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """Return the bytes of one server-sent event with a name, and ``value`` as JSON."""
    return b"event: " + name.encode() + b"\n" + event(value)


def error_event(error: Exception) -> bytes:
    """Return the event that ends a failed stream: the error's body without a name."""
    return b"data: " + bytes(from_exception(error).body) + b"\n\n"


def json_response(value: object, headers: dict[str, str] | None = None) -> Response:
    """Return a response with ``value`` as JSON."""
    return Response(orjson.dumps(value), headers=headers, media_type="application/json")


class WholeAnswer(Protocol):
    """Protocol of a whole response that is collected from the deltas of all choices."""

    def add(self, index: int, delta: Delta) -> None: ...

    def body(self) -> dict[str, Any]: ...


class Chunks(Protocol):
    """Protocol of a streamed response that is made from the deltas of all choices.

    ``add`` returns the events for a delta, or b"" if there is nothing to send yet; ``end`` returns
    the last events.
    """

    def add(self, index: int, delta: Delta) -> bytes: ...

    def end(self) -> bytes: ...


Deltas = AsyncGenerator[tuple[int, Delta], None]  #: (index of the choice, its delta)


async def collect_body(deltas: Deltas, answer: WholeAnswer) -> dict[str, Any]:
    """Add all deltas to ``answer`` and return the complete body."""
    async with aclosing(deltas) as source:
        async for index, delta in source:
            answer.add(index, delta)
    return answer.body()


async def event_chunks(deltas: Deltas, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """Add all deltas to ``chunks`` and yield the bytes to write, one or more events at a time.

    An event waits for the next one if its sequence's next delta has already arrived.
    """
    held = b""
    try:
        async with aclosing(deltas) as source:
            async for index, delta in source:
                held += chunks.add(index, delta)
                if held and not delta.more:
                    yield held
                    held = b""
    except Exception:
        if held:
            yield held
        raise
    yield held + chunks.end()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must already have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(request: Request, metrics: Metrics, work: Awaitable[T]) -> T:
    """Return the result of ``work``, or cancel it as soon as the client disconnects.

    Raises:
        RequestError: the client disconnected (code "client_closed").
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        metrics.disconnected.inc()
        raise RequestError("the client disconnected", code="client_closed", status=CLIENT_CLOSED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class EventStream(Response):
    """A response of server-sent events.

    If ``source`` fails before its first event, the response is a regular error. A later failure is
    sent as a last event, by default ``{"error": ...}``.

    Args:
        source: yields the bytes of whole events.
        metrics: the server's metrics.
        stall: seconds after which a blocked write (the client does not read) ends the stream and
            the connection.
        headers: further headers.
        failure: returns the event for an error after the first event.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        metrics: Metrics,
        stall: float,
        headers: dict[str, str] | None = None,
        failure: Callable[[Exception], bytes] = error_event,
    ) -> None:
        super().__init__(headers=headers)
        self._failure = failure
        self._source = source
        self._metrics = metrics
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _record(scope).streamed = True
        writer = asyncio.ensure_future(self._write(scope, send))
        watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                self._metrics.disconnected.inc()
                _record(scope).leave()
        finally:
            watcher.cancel()
            if not writer.done():
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, scope: Scope, send: Send) -> None:
        """Send the headers and all events, one write at a time."""
        async with aclosing(self._source) as source:
            first = await anext(source)
            headers = [
                (name, value) for name, value in self.raw_headers if name != b"content-length"
            ]
            await send(
                {"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *headers]}
            )
            guard = _StallGuard(scope, self._stall)
            try:
                await guard.send(send, first)
                async for data in source:
                    await guard.send(send, data)
            except Exception as error:
                self._metrics.rejected.inc(labels=("stream",))
                _record(scope).fail(error)
                # a dead engine is logged once, by the server
                if not isinstance(error, RequestError | EngineDead):
                    logger.exception("a stream failed")
                await guard.send(send, self._failure(error))
            finally:
                guard.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _record(scope: Scope) -> RequestRecord:
    """Return the request's log record; an unused one if :class:`RequestGate` is not installed."""
    return scope.get(RECORD) or RequestRecord("", "", "")


def _write_nothing(body: bytes) -> bool:
    """Write nothing and return False; replaces ``glowplug.write`` on servers without it."""
    return False


class _StallGuard:
    """A watchdog that closes a stream's connection when one write has been blocked for too long.

    One timer for all writes checks every ``seconds / 2``. ``seconds``: the time limit.
    """

    def __init__(self, scope: Scope, seconds: float) -> None:
        extensions: dict[str, Any] = scope.get("extensions") or {}
        self._record = _record(scope)
        self._abort = extensions.get("glowplug.abort", {}).get("call")
        self._write: Callable[[bytes], bool] = (
            extensions.get("glowplug.write", {}).get("call") or _write_nothing
        )
        self._seconds = seconds
        self._blocked_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._check)

    async def send(self, send: Send, body: bytes) -> None:
        """Write ``body`` directly if possible, otherwise through ``send``."""
        if self._write(body):
            return
        self._blocked_since = self._loop.time()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._blocked_since = 0.0

    def _check(self) -> None:
        """Close the connection if a write has been blocked for too long."""
        blocked = self._loop.time() - self._blocked_since if self._blocked_since else 0.0
        if blocked >= self._seconds and self._abort is not None:
            logger.warning("a client did not read for %.0f s: its stream is closed", blocked)
            self._record.reason = f"the client did not read for {blocked:.0f} s"
            self._abort()
            return
        self._timer = self._loop.call_later(self._seconds / 2, self._check)

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
