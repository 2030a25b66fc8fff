"""``glowplug serve`` as a process, the real engine on a tiny random model: clients, disconnects,
signals, a killed rank.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glowplug.entrypoints.server.serve import bind
from tests.e2e.served_folder import write_served
from tests.e2e.serving import HELD, HTTP, gauge
from tests.support.waiting import LIMIT, until

openai = pytest.importorskip("openai", reason="the clients come with the extra `test`")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("served"))


class Serving:
    def __init__(self, folder: Path, log: Path, *words: str) -> None:
        with bind("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self.port}", log
        command = [
            "-m",
            "glowplug",
            "serve",
            "--model",
            str(folder),
            "--set",
            "weights.use=random",
            "--port",
            str(self.port),
            "--set",
            "server.served_model_name=tiny",
            *words,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with log.open("w") as errors:
            self.process = psutil.Popen(
                [sys.executable, *command], env=environment, stdout=errors, stderr=errors
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            try:
                return HTTP.get(self.url + "/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(ready, "the server is ready")

    def gauge(self, name: str) -> float:
        return gauge(HTTP.get(self.url + "/metrics").text, name)

    def wait_idle(self) -> None:
        until(lambda: not any(map(self.gauge, HELD)), "no sequence is held")


@contextmanager
def serving(folder: Path, log: Path, *words: str) -> Iterator[Serving]:
    """Start a server process with ``words`` as further flags."""
    one = Serving(folder, log, *words)
    family = [one.process]
    try:
        one.wait_ready()
        family += one.process.children(recursive=True)
        yield one
    finally:
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(folder, tmp_path_factory.mktemp("log") / "serve.log") as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60
    ) as one:
        yield one


def request(text: str = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **fields}


def send_only(server: Serving, body: dict[str, Any]) -> socket.socket:
    """Return a connection that has sent its request and reads nothing."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(raw) + raw
    )
    return connection


def test_streamed_equals_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**request(), extra_body={"ignore_eos": True}).choices[0]
    chunks = list(
        client.chat.completions.create(**request(stream=True), extra_body={"ignore_eos": True})
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    )
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"


def test_seeds_repeat_alone_and_among_choices(client: openai.OpenAI) -> None:
    sampled = request(temperature=1.0, seed=11, n=3)
    first = [choice.message.content for choice in client.chat.completions.create(**sampled).choices]
    again = [choice.message.content for choice in client.chat.completions.create(**sampled).choices]
    alone = (
        client.chat.completions.create(**{**sampled, "seed": 12, "n": 1}).choices[0].message.content
    )
    assert first == again and first[1] == alone and len(set(first)) == 3


def test_prompt_scores_agree_with_generated_ones(client: openai.OpenAI) -> None:
    """Greedy tokens are generated, then sent as a prompt: each must be its position's best, with
    the same score.
    """
    ids = list(b"the same tokens")
    made = client.completions.create(
        model="tiny",
        prompt=ids,
        max_tokens=8,
        temperature=0,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]
    scored = (
        client.completions.create(
            model="tiny", prompt=ids + made.token_ids, max_tokens=0, echo=True, logprobs=1
        )
        .choices[0]
        .logprobs
    )
    assert len(scored.tokens) == len(ids) + 8
    assert scored.token_logprobs[len(ids) :] == pytest.approx(
        made.logprobs.token_logprobs, abs=1e-4
    )
    generated = zip(
        scored.tokens[len(ids) :],
        scored.token_logprobs[len(ids) :],
        scored.top_logprobs[len(ids) :],
    )
    assert all(best == {token: value} for token, value, best in generated)


def test_the_second_time_the_prefix_is_cached(client: openai.OpenAI) -> None:
    text = "a prefix that fills several pages of the pool, " * 3
    counts = [
        client.chat.completions.create(**request(text)).usage.prompt_tokens_details.cached_tokens
        for _ in "ab"
    ]
    salted = client.chat.completions.create(**request(text), extra_body={"cache_salt": "other"})
    assert (
        counts[0] == 0
        and counts[1] >= 128
        and salted.usage.prompt_tokens_details.cached_tokens == 0
    )


def test_two_hundred_streams_finish_alike(server: Serving) -> None:
    async def run() -> set[str]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=120
        ) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(**request(stream=True, max_tokens=8))
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return set(await asyncio.gather(*(one() for _ in range(200))))

    assert len(asyncio.run(run())) == 1
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_client_frees_its_pages(server: Serving, stream: bool) -> None:
    """Its sequences are aborted: none of them runs to its end."""
    before = server.gauge("num_aborted_requests_total")
    with send_only(server, request(max_tokens=450, ignore_eos=True, stream=stream, n=4)):
        until(lambda: server.gauge("kv_used_tokens"), "pages are in use")
    server.wait_idle()
    assert server.gauge("num_aborted_requests_total") - before == 4


def test_a_bad_request_costs_only_itself(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**request("x" * 600))
    assert long.value.code == "context_length_exceeded"
    assert client.chat.completions.create(**request()).choices[0].finish_reason in (
        "stop",
        "length",
    )


def test_the_api_process_has_no_torch_and_one_port(server: Serving) -> None:
    assert not any("torch" in part.path for part in server.process.memory_maps())
    family = [server.process, *server.process.children(recursive=True)]
    listening = [
        c.laddr
        for one in family
        for c in one.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", server.port)]


def test_sigterm_ends_with_code_zero_and_no_orphan(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log") as one:
        family = one.process.children(recursive=True)
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(LIMIT) == 0, one.log
        assert not psutil.wait_procs(family, timeout=LIMIT)[1], "orphans"
        assert "Traceback" not in one.log


def test_a_killed_rank_ends_the_server_and_its_clients_get_the_error(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path / "log") as one:
        family = one.process.children(recursive=True)
        with HTTP.stream(
            "POST",
            one.url + "/v1/chat/completions",
            timeout=LIMIT,
            json=request(max_tokens=450, ignore_eos=True, stream=True),
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            rank = max(family, key=lambda process: process.memory_info().rss)
            rank.kill()
            rest = "".join(lines)
        assert '"code":"engine_dead"' in rest and "[DONE]" not in rest
        assert one.process.wait(LIMIT) == 1, one.log
        assert not psutil.wait_procs(family, timeout=LIMIT)[1], "orphans"


def test_a_second_signal_leaves_no_orphan(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log") as one:
        family = one.process.children(recursive=True)
        connection = send_only(one, request(max_tokens=450, ignore_eos=True))
        until(lambda: one.gauge("num_requests_running"), "the request runs")
        one.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(LIMIT) in (0, 130)
        assert not psutil.wait_procs(family, timeout=LIMIT)[1], "orphans"
        connection.close()
