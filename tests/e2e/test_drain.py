"""Start and end of a server: the port, /health and /ready while loading, signals, the engine's
death.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.core.plan.resolve import plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.front import client as client_module
from glowplug.entrypoints.server.serve import bind, main
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, served
from tests.e2e.test_streaming import events
from tests.support.waiting import LIMIT, until

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


class Process:
    """A server process. ``start`` sends a request in a thread; its answer is appended to
    ``answers``.

    While the file ``loading`` exists the model is not ready; while ``held`` does, no request gets a
    token.
    """

    def __init__(self, folder: Path, drain: float, loading: bool, held: bool) -> None:
        self.loading, self.held = folder / "loading", folder / "held"
        for file, wanted in ((self.loading, loading), (self.held, held)):
            if wanted:
                file.touch()
        with bind("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.answers: list[httpx.Response] = []
        self._threads: list[threading.Thread] = []
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.e2e.fake_server",
                str(self.port),
                str(drain),
                self.loading,
                self.held,
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, path: str, status: int) -> httpx.Response:
        def answered() -> httpx.Response | None:
            try:
                answer = HTTP.get(self.url + path)
            except httpx.TransportError:
                return None
            return answer if answer.status_code == status else None

        found = until(answered, f"{path} answers {status}")
        assert found is not None
        return found

    def start(self, body: dict[str, Any]) -> None:
        thread = threading.Thread(
            target=lambda: self.answers.append(HTTP.post(self.url + CHAT, json=body))
        )
        thread.start()
        self._threads.append(thread)

    def wait_running(self, count: int) -> None:
        line = f'num_requests_running{{model_name="fake"}} {count}\n'
        until(lambda: line in HTTP.get(self.url + "/metrics").text, f"{count} requests run")

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=LIMIT)
        for thread in self._threads:
            thread.join(LIMIT)
        return self.process.returncode, errors


@contextmanager
def process(
    folder: Path, drain: float = 20 * LIMIT, loading: bool = False, held: bool = False
) -> Iterator[Process]:
    one = Process(folder, drain, loading, held)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def test_sigterm_lets_running_work_finish_and_takes_no_new(tmp_path: Path) -> None:
    with process(tmp_path, held=True) as one:
        one.wait("/ready", 200)
        text = "x" * 100
        one.start(ask(f"say:{text}", stream=True))
        one.start(ask(f"say:{text}"))
        one.wait_running(2)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait("/ready", 503).json()["error"]["code"] == "draining"
        assert one.wait("/health", 200).json()["status"] == "draining"
        refused = HTTP.post(one.url + CHAT, json=ask("late"))
        assert refused.status_code == 503 and refused.headers["retry-after"]
        one.held.unlink()
        code, errors = one.end()
        assert code == 0 and "Traceback" not in errors
        streamed, whole = sorted(
            one.answers, key=lambda answer: answer.headers["content-type"], reverse=True
        )
        assert (
            "".join(
                chunk["choices"][0]["delta"].get("content", "") for chunk in events(streamed.text)
            )
            == text
        )
        assert whole.json()["choices"][0]["message"]["content"] == text
        with pytest.raises(httpx.ConnectError):
            HTTP.get(one.url + "/health")


def test_the_drain_limit_ends_remaining_requests_with_a_reason(tmp_path: Path) -> None:
    with process(tmp_path, drain=0.3) as one:
        one.wait("/ready", 200)
        one.start(ask("say:x", stream=True, ignore_eos=True))
        one.wait_running(1)
        one.process.send_signal(signal.SIGTERM)
        code, errors = one.end()
        assert code == 0 and "Traceback" not in errors
        for words in ("draining 1 request, ", "still running are aborted", "the server stops"):
            assert words in errors
        assert events(one.answers[0].text)[-1]["choices"][0]["finish_reason"] == "abort"


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    """It has an exit status of its own, comes long before the drain timeout, and does not wait for
    the running request.
    """
    with process(tmp_path) as one:
        one.wait("/ready", 200)
        connection = socket.create_connection(("127.0.0.1", one.port))
        body = b'{"messages": [{"role": "user", "content": "hang:"}]}'
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        one.wait_running(1)
        one.process.send_signal(signal.SIGTERM)
        one.wait("/ready", 503)
        one.process.send_signal(signal.SIGTERM)
        code, _ = one.end()
        assert code == 130
        connection.close()


def test_a_signal_while_loading_does_not_wait_for_the_weights(tmp_path: Path) -> None:
    with process(tmp_path, loading=True) as one:
        assert one.wait("/health", 200).json()["status"] == "starting"
        one.process.send_signal(signal.SIGINT)
        assert one.end()[0] == 0 and one.loading.exists()


def test_the_port_answers_while_the_model_loads() -> None:
    loaded = threading.Event()
    with served(FakeExecutor(loaded=loaded), ready=False) as one:
        assert HTTP.get(one.url + "/health").json() == {"status": "starting"}
        calls = (
            ("GET", "/ready", None),
            ("GET", "/health_generate", None),
            ("POST", CHAT, ask("x")),
            ("POST", "/flush_cache", None),
            ("POST", "/start_profile", {}),
            ("POST", "/stop_profile", None),
        )
        for method, path, body in calls:
            answer = HTTP.request(method, one.url + path, json=body)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "starting"
            assert int(answer.headers["retry-after"]) > 0
        assert HTTP.get(one.url + "/v1/models").status_code == 200
        loaded.set()
        one.wait_ready()
        assert HTTP.post(one.url + CHAT, json=ask("say:x")).status_code == 200


def test_a_taken_port_is_one_line_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("the port is taken, and something was loaded")

    for name in ("open_tokenizer", "start_executor"):
        monkeypatch.setattr(f"glowplug.entrypoints.server.serve.{name}", load)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        plugins = load_plugins(entry_points=False)
        planned = plan({"model": "embedded", "server": {"port": port}}, plugins=plugins)
        assert main(planned, plugins) == 1
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 1
        and str(port) in lines[0]
        and "in use | fix: " in lines[0]
        and "--port" in lines[0]
    )


def test_a_failed_start_ends_the_server() -> None:
    executor = FakeExecutor()

    def refuse(plan: object) -> None:
        raise client_module.EngineDead("rank 0 (weights): model-3.safetensors is 12 bytes short")

    executor.start = refuse  # type: ignore[method-assign]
    with served(executor, ready=False) as one:
        assert one.join() == 1


def test_the_engines_death_reaches_every_request_and_ends_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = FakeExecutor(step_seconds=0.01)
    with served(executor) as one:
        answers: list[httpx.Response] = []
        bodies = [ask("say:x", stream=stream, ignore_eos=True) for stream in (True, False)]
        threads = [
            threading.Thread(
                target=lambda body=body: answers.append(HTTP.post(one.url + CHAT, json=body))
            )
            for body in bodies
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(executor.running) == 2, "both requests run")
        before = executor.stats.output_tokens
        until(
            lambda: one.context.client.stats().output_tokens > before + 3,
            "both requests have tokens",
        )
        executor.die()
        for thread in threads:
            thread.join(LIMIT)
        assert one.join() == 1
    streamed = next(answer for answer in answers if answer.status_code == 200)
    whole = next(answer for answer in answers if answer.status_code == 500)
    assert whole.json()["error"]["code"] == "engine_dead"
    assert "[DONE]" not in streamed.text and '"code":"engine_dead"' in streamed.text
    assert "secret" not in streamed.text + whole.text and "0x" not in streamed.text + whole.text
    assert caplog.text.count("killed by signal 9") == 1 and "Traceback" not in caplog.text, (
        "once, not for each request"
    )


def test_a_silent_engine_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    with served(executor) as one:
        assert HTTP.get(one.url + "/health").status_code == 200
        executor.silent = True
        monkeypatch.setattr(client_module, "HEARTBEAT_LIMIT", 0.6)
        until(
            lambda: HTTP.get(one.url + "/health").status_code == 503,
            "the engine counts as unhealthy",
        )
        for path in ("/health", "/ready"):
            answer = HTTP.get(one.url + path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
        executor.silent = False


def test_health_generate_makes_a_token_and_spares_a_busy_engine() -> None:
    executor = FakeExecutor()
    with served(executor) as one:
        assert HTTP.get(one.url + "/health_generate").status_code == 200
        assert executor.stats.output_tokens == 1
        thread = threading.Thread(target=lambda: HTTP.post(one.url + CHAT, json=ask("hang:")))
        thread.start()
        until(lambda: one.context.client.stats().running, "the request runs")
        seen = len(executor.params)
        assert HTTP.get(one.url + "/health_generate").status_code == 200
        assert len(executor.params) == seen
        HTTP.post(one.url + "/abort_request", json={"abort_all": True})
        thread.join(LIMIT)
