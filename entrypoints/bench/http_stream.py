"""A small HTTP/1.1 client on asyncio streams: one request a connection, the body handed on as it arrives.

It exists so that the load generator costs as little as possible: no connection pool and no layers between the socket
and the time stamp.
"""
from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson

LIMIT = 1 << 20  #: bytes of one header block or chunk line


@dataclass(frozen=True)
class Target:
    """Where requests go. ``headers`` are sent with every request."""

    base_url: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 6 * 3600.0

    def address(self) -> tuple[str, int, bool, str]:
        """(host, port, TLS, path prefix). ValueError for a URL that is not http or https."""
        parts = urlsplit(self.base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{self.base_url!r} is not an http or https address")
        secure = parts.scheme == "https"
        return parts.hostname, parts.port or (443 if secure else 80), secure, parts.path.rstrip("/")


@dataclass
class Reply:
    """Status, lower-case headers, and the body as an iterator of byte pieces."""

    status: int
    headers: dict[str, str]
    body: AsyncIterator[bytes] = field(repr=False)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.body])


class Connection:
    """``async with Connection(target) as c: reply = await c.request("POST", "/path", {...})``."""

    def __init__(self, target: Target) -> None:
        self.target = target

    async def __aenter__(self) -> Connection:
        host, port, secure, self.prefix = self.target.address()
        context = ssl.create_default_context() if secure else None
        self.reader, self.writer = await asyncio.open_connection(host, port, ssl=context, limit=LIMIT)
        self.host = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()

    async def request(self, method: str, path: str, payload: object = None) -> Reply:
        """Send one request. ConnectionError or ValueError when the answer is not HTTP."""
        body = b"" if payload is None else orjson.dumps(payload)
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}", "Connection: close",
                 "Accept: */*", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in self.target.headers]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()
        return await self._reply()

    async def _reply(self) -> Reply:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the server closed the connection without an answer") from error
        first, *rest = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        return Reply(int(first.split(" ", 2)[1]), headers, self._body(headers))

    def _body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunked()
        return self._plain(int(headers.get("content-length", "-1")))

    async def _chunked(self) -> AsyncIterator[bytes]:
        while size := int((await self.reader.readline()).split(b";")[0] or b"0", 16):
            piece = await self.reader.readexactly(size + 2)
            yield piece[:-2]

    async def _plain(self, length: int) -> AsyncIterator[bytes]:
        while length:
            piece = await self.reader.read(65536)
            if not piece:
                if length > 0:
                    raise ConnectionError(f"the answer ended {length} bytes early")
                return
            length -= len(piece) if length > 0 else 0
            yield piece


async def call(target: Target, method: str, path: str, payload: object = None) -> tuple[int, bytes]:
    """One whole exchange: (status, body)."""
    async with asyncio.timeout(target.timeout), Connection(target) as connection:
        reply = await connection.request(method, path, payload)
        return reply.status, await reply.read()


async def events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The ``data:`` values of a server-sent event stream, the final ``[DONE]`` left out.

    EOFError when the stream ends without ``[DONE]``: it was cut, whatever its status said.
    """
    rest = b""
    async for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:].strip()
                if value == b"[DONE]":
                    return
                yield value
    raise EOFError("the stream ended without [DONE]")
