"""The API process's time for one streamed token: 20,000 tokens a second must fit into one core."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import served
from tests.support.pace import slowness, yardstick

STREAMS, TOKENS = 64, 200


class Reader(asyncio.Protocol):
    """A client that sends one request, counts the events of the answer and parses nothing."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request, self._done, self._events = request, done, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._events += data.count(b"data: ")
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done.set_result(self._events)


async def read_all(port: int, request: bytes) -> list[int]:
    loop = asyncio.get_running_loop()
    done = [loop.create_future() for _ in range(STREAMS)]
    for one in done:
        await loop.create_connection(lambda one=one: Reader(request, one), "127.0.0.1", port)
    return list(await asyncio.gather(*done))


@pytest.mark.timing
def test_twenty_thousand_tokens_a_second() -> None:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "say:a few words "}],
            "stream": True,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    with served(FakeExecutor(step_seconds=0.0005)) as one:
        asyncio.run(read_all(one.port, request))
        best = 1.0
        paces = []
        for _ in range(10):  # other processes on the machine slow some of them
            paces.append(yardstick())
            start = one.loop_seconds()
            events = asyncio.run(read_all(one.port, request))
            best = min(best, (one.loop_seconds() - start) / (STREAMS * TOKENS))
            if best < 50e-6 * slowness(paces):
                break
    # role, every token, finish reason, [DONE]
    assert events == [TOKENS + 3] * STREAMS
    print(f"\n{best * 1e6:.1f} us of CPU a token: {1 / best:.0f} tokens/s on one core")
    assert best < 50e-6 * slowness(paces), paces
