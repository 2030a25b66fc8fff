"""A small HTTP/1.1 client for load generation: one request per connection, parsed afterwards.

The client exists to make the load generator as cheap as possible. While an answer arrives, each
piece of it costs only a time stamp and an entry in a list. Nothing is parsed before the whole
answer has arrived.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import urlsplit

import orjson

HEAD_END = b"\r\n\r\n"
BODY_END = b"0\r\n\r\n"

Piece = tuple[float, bytes]  #: (arrival time in seconds of ``time.perf_counter``, bytes)


@dataclass(frozen=True)
class ServerTarget:
    """The server that requests go to.

    Attributes:
        base_url: its URL.
        headers: headers of every request.
        timeout: seconds that a request may take.
        verify: check the server's certificate.
    """

    base_url: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 6 * 3600.0
    verify: bool = True

    def with_header(self, name: str, value: str) -> ServerTarget:
        """Return the same server with one more header."""
        return replace(self, headers=(*self.headers, (name, value)))

    def address(self) -> tuple[str, int, bool, str]:
        """Return (host, port, TLS, path prefix).

        Raises:
            ValueError: the URL is neither http nor https.
        """
        parts = urlsplit(self.base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{self.base_url!r} is not an http or https URL")
        secure = parts.scheme == "https"
        return parts.hostname, parts.port or (443 if secure else 80), secure, parts.path.rstrip("/")

    def request(self, method: str, path: str, payload: object = None) -> bytes:
        """Return the bytes of an HTTP request to this server, with ``payload`` as JSON."""
        host, port, _, prefix = self.address()
        body = b"" if payload is None else orjson.dumps(payload)
        lines = [
            f"{method} {prefix}{path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: close",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join(lines).encode() + HEAD_END + body


@dataclass
class StreamedAnswer:
    """A parsed answer: status, lower-case headers, and the body's pieces without chunk framing."""

    status: int
    headers: dict[str, str]
    pieces: list[Piece]

    def read(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


async def exchange(
    target: ServerTarget, method: str, path: str, payload: object = None
) -> list[Piece]:
    """Send one request and return the bytes of the answer as they arrived.

    Raises:
        OSError: the connection failed.
        TimeoutError: the answer took longer than ``target.timeout``.
    """
    host, port, secure, _ = target.address()
    loop = asyncio.get_running_loop()
    request = target.request(method, path, payload)
    transport, protocol = await loop.create_connection(
        lambda: _Collector(request, loop.create_future()),
        host,
        port,
        ssl=_tls(target.verify) if secure else None,
    )
    try:
        async with asyncio.timeout(target.timeout):
            return await protocol.done
    finally:
        transport.close()


def _tls(verify: bool) -> ssl.SSLContext:
    """Return the settings of a TLS connection. ``verify``: check the server's certificate."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def call(
    target: ServerTarget, method: str, path: str, payload: object = None
) -> tuple[int, bytes]:
    """Send one request, wait for the whole answer and return (status, body)."""
    answer = read_answer(await exchange(target, method, path, payload))
    return answer.status, answer.read()


class _Collector(asyncio.Protocol):
    """Protocol that sends the request and time-stamps the pieces of the answer.

    ``done`` receives the pieces once the answer is complete or the server has closed the
    connection.
    """

    def __init__(self, request: bytes, done: asyncio.Future[list[Piece]]) -> None:
        self.done = done
        self._request = request
        self._pieces = list[Piece]()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of it
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        self._tail = data if len(data) >= len(BODY_END) else self._tail[-len(BODY_END) :] + data
        # NOTE: the end is detected from the body, since servers may close the connection late and
        # the next request waits until this one has ended.
        if self._tail.endswith(BODY_END) and _is_whole(self._pieces):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.done.done():
            self.done.set_exception(exc)
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(self._pieces)


def _is_whole(pieces: Sequence[Piece]) -> bool:
    """Return whether a chunked answer is complete.

    The whole answer is parsed, because the bytes that end it may also occur within its body.
    """
    try:
        read_answer(pieces)
    except ConnectionError:
        return False
    return True


# ---- reading -------------------------------------------------------------------------------------


def read_answer(pieces: Sequence[Piece]) -> StreamedAnswer:
    """Parse the head of an answer and undo the chunk framing of its body.

    Raises:
        ConnectionError: the answer ended early.
        ValueError: the bytes are not HTTP.
    """
    head, rest = _split_head(pieces)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = list(_dechunked(rest))
    else:
        body = rest
        missing = int(headers.get("content-length", "0")) - sum(len(piece) for _, piece in rest)
        if missing > 0:
            raise ConnectionError(f"the answer ended {missing} bytes early")
    return StreamedAnswer(int(first.split(" ", 2)[1]), headers, body)


def _split_head(pieces: Sequence[Piece]) -> tuple[bytes, list[Piece]]:
    """Return (head of the answer, pieces of its body)."""
    head = b""
    for index, (at, piece) in enumerate(pieces):
        head += piece
        end = head.find(HEAD_END)
        if end >= 0:
            remainder = head[end + len(HEAD_END) :]
            return head[:end], [(at, remainder)] * bool(remainder) + list(pieces[index + 1 :])
    raise ConnectionError("the server closed the connection without an answer")


def _dechunked(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the data of each chunk, with the arrival time of its end.

    Raises:
        ConnectionError: the last, empty chunk is missing.
    """
    held = b""
    for at, piece in pieces:
        held = held + piece if held else piece
        start = 0
        while (line := held.find(b"\r\n", start)) >= 0:
            size = int(held[start:line].split(b";")[0], 16)
            end = line + 2 + size
            if not size and held.find(HEAD_END, line) >= 0:
                return
            if not size or len(held) < end + 2:
                break
            yield at, held[line + 2 : end]
            start = end + 2
        held = held[start:]
    raise ConnectionError("the answer ended within its body")


def events(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield (time, value) of every ``data:`` line of a server-sent event stream.

    The final ``[DONE]`` is left out.

    Raises:
        EOFError: the stream ended without ``[DONE]``, so it is incomplete whatever its status was.
    """
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:].strip()
                if value == b"[DONE]":
                    return
                yield at, value
    raise EOFError("the stream ended without [DONE]")
