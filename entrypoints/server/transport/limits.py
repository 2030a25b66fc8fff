"""Limits on requests, as ASGI middleware: body size, header count and size, the Host header."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.errors import error_response, in_form_of
from glowplug.entrypoints.server.metrics import Metrics
from glowplug.entrypoints.server.observers import RequestObservers
from glowplug.entrypoints.server.request_log import RECORD, RequestLog, RequestRecord, peer
from glowplug.entrypoints.server.transport.websockets import (
    WEBSOCKET,
    refuse_origin,
    tagged_websocket,
)

MAX_HEADERS = 100  #: headers of one request
MAX_HEADER_BYTES = 64 << 10  #: total size of the names and values of one request

MAX_TRACE_BYTES = 512  #: size of ``traceparent`` or ``tracestate``; a longer one is ignored
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})

_HOST = re.compile(rb"[A-Za-z0-9.:\-\[\]_]{1,255}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")

Headers = Iterable[tuple[bytes, bytes]]


class RequestGate:
    """The outermost ASGI layer of the app.

    The layer sets the request id, refuses malformed headers, limits the body, and counts, measures
    and logs requests.

    Args:
        app: the next layer.
        max_body_bytes: size of the largest accepted body in bytes.
        metrics: the server's metrics.
        log: the request log.
        observers: receivers of ended requests.
        polls: routes whose requests are logged at level debug.
        origins: origins of other sites whose pages may open websockets; "*" for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        metrics: Metrics,
        log: RequestLog,
        observers: RequestObservers,
        polls: Collection[str],
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._max_body = max_body_bytes
        self._metrics = metrics
        self._log = log
        self._observers = observers
        self._polls = frozenset(polls)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", WEBSOCKET):
            return
        record = _record(scope)
        tagged = (tagged_websocket if scope["type"] == WEBSOCKET else _tagged)(send, record)
        refusal = self._refusal(scope)
        try:
            if refusal is not None:
                record.fail(refusal)
                answer = error_response(str(refusal), refusal.status, code=refusal.code)
                await in_form_of(scope["path"], answer, record.id)(scope, receive, tagged)
            else:
                await self._app(scope, _limited(receive, self._max_body), tagged)
        except WebSocketDisconnect:
            record.leave()
        except Exception as error:
            record.fail(error)
            error.add_note(f"request id: {record.id}")  # in the logged traceback
            raise
        finally:
            self._end(scope, record)

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Return the error for headers that are refused, or for another site's websocket."""
        refusal = _refuse_headers(scope["headers"], self._max_body)
        if refusal is None and scope["type"] == WEBSOCKET:
            refusal = refuse_origin(scope["headers"], self._origins)
        return refusal

    def _end(self, scope: Scope, record: RequestRecord) -> None:
        """Add an ended request to the metrics and to the log."""
        path = getattr(scope.get("route"), "path", None)
        record.route = path or record.route
        record.seconds = time.monotonic() - record.started
        self._metrics.http(path or "unmatched", record.method, record.status, record.seconds)
        self._log.write(record, poll=path in self._polls)
        self._observers.ended(record)


def _record(scope: Scope) -> RequestRecord:
    """Return the record of a request or websocket, which is stored in the scope, as is its id."""
    request_id = _request_id(scope["headers"])
    method = "WEBSOCKET" if scope["type"] == WEBSOCKET else scope["method"]
    record = RequestRecord(request_id, method, scope["path"], peer(scope.get("client")))
    record.set_trace(_trace_headers(scope["headers"]))
    scope["glowplug.request_id"] = request_id
    scope[RECORD] = record
    return record


def _request_id(headers: Headers) -> str:
    """Return the client's own request id if it has only safe characters, else a new id."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def _trace_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of W3C trace context that are not too long."""
    return {
        name.decode("ascii"): value.decode("latin-1")
        for name, value in headers
        if name in _TRACE_HEADERS and len(value) <= MAX_TRACE_BYTES
    }


def _tagged(send: Send, record: RequestRecord) -> Send:
    """Return an ASGI ``send`` that adds the request id to the response and records its status."""
    id_header = (b"x-request-id", record.id.encode())

    async def tagged(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*_without_id(message.get("headers", ())), id_header]
        await send(message)

    return tagged


def _without_id(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() != b"x-request-id"]


def _refuse_headers(headers: list[tuple[bytes, bytes]], max_body: int) -> RequestError | None:
    """Return an error if the headers are malformed or exceed a limit; None otherwise."""
    if (
        len(headers) > MAX_HEADERS
        or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES
    ):
        return RequestError("too many or too large headers", code="headers_too_large", status=431)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return RequestError("missing or malformed Host header", code="invalid_host")
    for name, value in headers:
        if name == b"content-length" and (not value.isdigit() or int(value) > max_body):
            return _too_large(max_body)
    return None


def _too_large(max_body: int) -> RequestError:
    return RequestError(
        f"the request body is larger than {max_body} bytes", code="body_too_large", status=413
    )


def _limited(receive: Receive, max_body: int) -> Receive:
    """Return an ASGI ``receive`` that raises RequestError if the body exceeds ``max_body`` bytes.

    Chunked bodies, which state no length, are limited too.
    """
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > max_body:
                raise _too_large(max_body)
        return message

    return counted
