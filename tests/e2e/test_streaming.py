"""Streamed text equals whole text for any text, split, stop strings and route; slow readers affect
no other client.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, Served, served
from tests.support.waiting import LIMIT, until

TEXTS = [
    "",
    "a",
    "plain words",
    "zwölf Boxkämpfer",
    "東京タワー",
    "🗼",
    "👩‍👩‍👧 and 🏳️‍🌈",
    "e\u0301 n\u0303",
    "a\nb\r\n\tc\x00d",
    'quotes " and \\ and </script>',
    "data: [DONE]\n\ndata: x",
    "\u2028\u2029\ufeff",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(context=1 << 15) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as one:
        yield one


def events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of each event; the stream must end with [DONE]."""
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert lines[-1] == "[DONE]" and text.endswith("data: [DONE]\n\n")
    return [json.loads(line) for line in lines[:-1]]


def chat(client: httpx.Client, text: str, **fields: Any) -> tuple[str, str]:
    """Return (text, finish reason) of the streamed and the whole answer, which must agree."""
    body = {"messages": [{"role": "user", "content": f"say:{text}"}], **fields}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    chunks = events(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and all(
        choice["finish_reason"] is None for choice in choices[:-1]
    )
    streamed = "".join(choice["delta"].get("content", "") for choice in choices)
    assert streamed == whole["message"]["content"]
    for name in ("finish_reason", "stop_reason", "matched_stop"):
        assert choices[-1][name] == whole[name]
    return streamed, whole["finish_reason"]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_equals_whole(client: httpx.Client, text: str) -> None:
    assert chat(client, text) == (text, "stop")


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_no_half_characters_inside_a_stream(client: httpx.Client, text: str) -> None:
    """The stream is cut after every token: only the very end may hold a replacement character, for
    bytes that never came.
    """
    raw = text.encode()
    for length in range(1, len(raw) + 1):
        got, reason = chat(client, text, max_tokens=length)
        assert got == raw[:length].decode("utf-8", "replace") and reason == "length"


def test_random_stops_over_token_boundaries(client: httpx.Client) -> None:
    rng = random.Random(7)
    for _ in range(60):
        text = "".join(rng.choice("abé🗼") for _ in range(rng.randint(1, 12)))
        stops = [
            "".join(rng.choice("abé🗼") for _ in range(rng.randint(1, 3)))
            for _ in range(rng.randint(1, 3))
        ]
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        expected = text[: min(found)[1]] if found else text
        kept = text[: min(found)[0]] if found else text
        got, reason = chat(client, text, stop=stops)
        # two stops may end at the same character: the longer one starts earlier and wins
        assert got == expected and reason == "stop", (text, stops)
        assert chat(client, text, stop=stops, include_stop_str_in_output=True)[0] == kept


def test_a_stop_string_in_the_prompt_is_no_stop(client: httpx.Client) -> None:
    assert chat(client, "end", stop=["say:"]) == ("end", "stop")


def test_completions_stream_equals_whole(client: httpx.Client) -> None:
    for text in TEXTS:
        body = {"prompt": f"say:{text}", "max_tokens": 200, "logprobs": 2, "echo": True}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]
        chunks = [
            chunk["choices"][0]
            for chunk in events(client.post("/v1/completions", json={**body, "stream": True}).text)
        ]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == f"say:{text}{text}"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for chunk in chunks for entry in chunk["logprobs"][name]] == whole[
                "logprobs"
            ][name]


def test_generate_streams_the_text_so_far(client: httpx.Client) -> None:
    body = {
        "text": "say:zwölf",
        "sampling_params": {"max_new_tokens": 50},
        "return_logprob": True,
        "rid": "mine",
    }
    whole = client.post("/generate", json=body).json()
    steps = events(client.post("/generate", json={**body, "stream": True}).text)
    texts = [step["text"] for step in steps]
    assert (
        all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
        and texts[-1] == "zwölf"
    )
    assert [step["meta_info"]["completion_tokens"] for step in steps] == list(
        range(1, len(b"zw\xc3\xb6lf") + 2)
    )
    for name in ("output_ids", "text"):
        assert steps[-1][name] == whole[name]
    meta = whole["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "stop", "matched": 257}
    assert steps[-1]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == whole["output_ids"]


def test_generate_takes_lists(client: httpx.Client) -> None:
    answers = client.post(
        "/generate",
        json={
            "text": ["say:a", "say:b"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 9}],
            "rid": ["one", "two"],
        },
    ).json()
    assert [(one["text"], one["meta_info"]["id"]) for one in answers] == [
        ("a", "one"),
        ("b", "two"),
    ]
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    steps = events(
        client.post(
            "/generate", json={"input_ids": [list(b"say:c"), list(b"say:d")], "stream": True}
        ).text
    )
    assert {step["index"]: step["text"] for step in steps} == {0: "c", 1: "d"}


def test_one_write_a_sequence_a_step(client: httpx.Client) -> None:
    """Each token is one event, and no event is split or doubled."""
    chunks = events(
        client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "say:" + "x" * 100}], "stream": True},
        ).text
    )
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", *["x"] * 100, None]


def test_two_hundred_streams_finish(server: Served) -> None:
    async def one(client: httpx.AsyncClient, i: int) -> None:
        answer = await client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": f"say:number {i}"}], "stream": True},
        )
        text = "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in events(answer.text)
        )
        assert text == f"number {i}"

    async def run() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(200)))

    asyncio.run(run())
    server.wait_idle()


@contextmanager
def reading_nothing(one: Served) -> Iterator[socket.socket]:
    """Yield a connection whose stream has filled every buffer on its way, so that the server cannot
    write to it.
    """
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((one.host, one.port))
        body = json.dumps(
            {
                "text": "say:" + "x" * 64,
                "stream": True,
                "sampling_params": {"max_new_tokens": 200_000, "ignore_eos": True},
            }
        ).encode()
        slow.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        connections = one.server._http.server_state.connections
        until(
            lambda: any(each.flow.write_paused for each in list(connections)), "a write is blocked"
        )
        yield slow


def test_a_client_that_does_not_read_slows_no_other_down() -> None:
    """Another client is answered while the first one's write is blocked, which no stall timeout
    ends here.
    """
    executor = FakeExecutor(step_seconds=0.0002)
    with (
        served(executor, context=1 << 20, server={"stall_timeout": 10 * LIMIT}) as one,
        reading_nothing(one),
    ):
        good = HTTP.post(one.url + "/v1/completions", json={"prompt": "say:quick", "max_tokens": 9})
        assert good.json()["choices"][0]["text"] == "quick"
        assert (len(executor.running), executor.stats.aborted) == (1, 0)


def test_a_client_that_does_not_read_is_dropped_alone() -> None:
    executor = FakeExecutor(step_seconds=0.0002)
    with (
        served(executor, context=1 << 20, server={"stall_timeout": 0.3}) as one,
        reading_nothing(one),
    ):
        one.wait_idle()
        assert executor.stats.aborted == 1
        good = HTTP.post(one.url + "/v1/completions", json={"prompt": "say:quick", "max_tokens": 9})
        assert good.json()["choices"][0]["text"] == "quick"
