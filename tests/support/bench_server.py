"""A small HTTP server for the load generator: every route it uses, a log of its requests, and
faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

from glowplug.entrypoints.bench.load.http_stream import ServerTarget
from tests.support.waiting import LIMIT

FIRST, GAP = 0.05, 0.01  #: seconds that the server takes before the first token and after each


class FakeServer:
    """A server with just enough HTTP: every route that the benchmark uses, and a log of its
    requests.
    """

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[tuple[str, dict]] = []
        self.heads: list[str] = []
        self.running = self.most = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(LIMIT)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> None:
            self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)
        self._server.close()

    @property
    def target(self) -> ServerTarget:
        return ServerTarget(f"http://127.0.0.1:{self.port}")

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            length = next(
                int(line.split(":")[1])
                for line in head.split("\r\n")
                if line.startswith("Content-Length")
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            self.asked.append((path, body))
            self.heads.append(head)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self._answer(path, body, writer)
            finally:
                self.running -= 1
        writer.close()

    async def _answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        plain = {
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/server_info": {
                "version": "x",
                "engine": {"startup_seconds": {"capture": 2.0}, "compile_seconds": 1.25},
            },
            "/get_model_info": {"vocab_size": 321},
            "/flush_cache": {},
        }
        if path == "/ready":
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        elif path == "/metrics":
            payload = self._metrics().encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(payload), payload)
            )
        elif path in plain:
            payload = json.dumps(plain[path]).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(payload), payload)
            )
        elif body.get("fault") == "refuse":
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nbad!")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            await self._stream(path, body, writer)
        await writer.drain()

    def _metrics(self) -> str:
        """Return counters of drafts as vLLM's servers do: ten verify steps of each answer, of which
        nine accept the first draft and four the second.
        """
        answers = sum("stream" in body for _, body in self.asked)
        name, labels = "vllm:spec_decode_num", 'engine="0",model_name="tiny"'
        position = f"{name}_accepted_tokens_per_pos_total"
        per_pos = "".join(
            f'{position}{{{labels},position="{at}"}} {count * answers}.0\n'
            for at, count in enumerate((9, 4))
        )
        return (
            f"# TYPE {name}_drafts_total counter\n"
            f"{name}_drafts_total{{{labels}}} {10 * answers}.0\n"
            f"{name}_draft_tokens_total{{{labels}}} {20 * answers}.0\n"
            f"{name}_accepted_tokens_total{{{labels}}} {13 * answers}.0\n{per_pos}"
        )

    async def _stream(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            for piece in (data[:7], data[7:]):  # an event may be split anywhere
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()

        native = path == "/generate"
        tokens = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        await asyncio.sleep(FIRST)
        for index in range(tokens):
            await send(b"data: " + json.dumps(self._event(path, index, tokens)).encode() + b"\n\n")
            if body.get("fault") == "cut" and index == 1:
                writer.write(b"0\r\n\r\n")
                return
            if body.get("fault") == "error" and index == 1:
                await send(b'data: {"error": {"message": "engine died"}}\n\n')
                writer.write(b"0\r\n\r\n")
                return
            await asyncio.sleep(GAP)
        if not native:
            usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
            await send(b"data: " + json.dumps(usage).encode() + b"\n\n")
        await send(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _event(path: str, index: int, tokens: int) -> dict:
        reason = "length" if index == tokens - 1 else None
        if path == "/generate":
            return {
                "text": "ab" * (index + 1),
                "meta_info": {"completion_tokens": index + 1, "prompt_tokens": 7},
            }
        if path == "/v1/chat/completions":
            return {"choices": [{"delta": {"content": "ab"}, "finish_reason": reason}]}
        return {"choices": [{"text": "ab", "finish_reason": reason}]}
