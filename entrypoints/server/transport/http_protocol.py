"""uvicorn's httptools protocol with limits on the request head and a hard close.

The head is limited in size and in time. llhttp has no limits: an endless header would be collected
forever (CVE-2025-48956).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.errors import error_body
from glowplug.entrypoints.server.request_log import RequestLog, RequestRecord, peer
from glowplug.entrypoints.server.transport.limits import MAX_HEADER_BYTES

HEAD_SECONDS = 30.0  #: time limit from the first byte of a request to the end of its headers
DISCARD_SECONDS = 30.0  #: time limit for reading the rest of a body that was already refused


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with time limits and two ASGI extensions.

    ``scope["extensions"]["glowplug.abort"]["call"]`` closes the connection at once and drops unsent
    bytes. ``scope["extensions"]["glowplug.write"]["call"]`` is :meth:`write_chunk`.

    Args:
        log: the request log, to report connections refused before a request is complete.
    """

    def __init__(self, *args: Any, log: RequestLog, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = log
        self._head_bytes = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._arm(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._deadline is None:
                self._arm(HEAD_SECONDS)
            self._head_bytes += len(data)
        super().data_received(data)
        # NOTE: this packet may contain a part of the body, so the size is checked only while the
        # head is incomplete.
        if (
            self._in_head
            and self._head_bytes > MAX_HEADER_BYTES
            and not self.transport.is_closing()
        ):
            self._refuse(
                "Request Header Fields Too Large",
                RequestError("too many or too large headers", code="headers_too_large", status=431),
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {
            "glowplug.abort": {"call": self.transport.abort},
            "glowplug.write": {"call": self.write_chunk},
        }

    def write_chunk(self, body: bytes) -> bool:
        """Write a chunk of the current response directly, without the layers around ``send``.

        Args:
            body: bytes of the chunk, not empty.

        Returns:
            False if nothing was written and ``send`` has to be used: the client reads too slowly
            or has disconnected.
        """
        cycle = self.cycle
        if (
            cycle is None
            or not cycle.chunked_encoding
            or cycle.response_complete
            or cycle.disconnected
            or self.flow.write_paused
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head:
            self._arm(DISCARD_SECONDS)

    def _arm(self, seconds: float) -> None:
        """Set the time limit of the connection, ``seconds`` from now."""
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._expired)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        """Close the connection after its deadline, unless a response is being written."""
        self._deadline = None
        answering = self.cycle is not None and not self.cycle.response_complete
        # a stray byte after a request must not end the response that is being written
        if answering:
            self._arm(HEAD_SECONDS)
        elif not self.transport.is_closing():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse("Bad Request", RequestError("this is not HTTP", code="invalid_http"))

    def _refuse(self, phrase: str, error: RequestError) -> None:
        """Send an error response, log it and close the connection."""
        body = error_body(str(error), error.status, code=error.code)
        head = (
            f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
        record = RequestRecord("", "", "", peer(self.client), status=error.status)
        record.fail(error)
        self._log.write(record)
