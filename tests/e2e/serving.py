"""A real HTTP server on a free port, in a thread, over the fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx

from glowplug.core.protocols import OutputParserFactory
from glowplug.entrypoints.front import event_loop
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server.app import create_app
from glowplug.entrypoints.server.serve import HttpServer, bind
from tests.e2e.fake_engine import FakeExecutor, make_plan, make_tokenizer
from tests.support.waiting import LIMIT, until

#: a new connection for each request, as from independent clients; making a client takes 20 ms
HTTP = httpx.Client(timeout=LIMIT, limits=httpx.Limits(max_keepalive_connections=0))
#: gauges that are 0 once all requests have ended
HELD = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_used_tokens",
)


class Served:
    """A running server: ``url`` is served inside the ``with`` block, and ``exit_code`` is set once
    the server has ended.
    """

    def __init__(
        self,
        executor: FakeExecutor,
        parsers: Sequence[OutputParserFactory],
        plan: Any,
        tokenizer: Any,
        plugins: Any,
    ) -> None:
        self.executor, self.exit_code, self._plugins = executor, -1, plugins
        self._parsers, self._plan, self._tokenizer = parsers, plan, tokenizer
        self._listener = bind("127.0.0.1", 0)
        self.host, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        event_loop.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        client = EngineClient(
            self._plan, self._tokenizer, self._tokenizer.eos_ids if self._tokenizer else ()
        )
        app = create_app(self._plan, client, self._tokenizer, self._parsers, self._plugins)
        self.context = app.state.context
        self.server = HttpServer(app, self.context, self._listener)
        self.exit_code = await self.server.run(self._make)

    def _make(self) -> Any:
        self.executor.start(self._plan)
        return self.executor

    def wait_ready(self) -> None:
        until(lambda: HTTP.get(self.url + "/ready").status_code == 200, "the server is ready")

    def loop_seconds(self) -> float:
        """Return the CPU seconds of the server's event loop so far."""
        future: Future[float] = Future()
        self._loop.call_soon_threadsafe(lambda: future.set_result(time.thread_time()))
        return future.result(LIMIT)

    def stop(self) -> None:
        """Stop the server as the first SIGTERM does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> int:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the server did not end"
        return self.exit_code

    def wait_idle(self) -> None:
        """Wait until the gauges show that the engine holds no request."""

        def idle() -> bool:
            text = HTTP.get(self.url + "/metrics").text
            return not any(gauge(text, name) for name in HELD)

        until(idle, "no sequence is held")


def gauge(text: str, name: str, prefix: str = "glowplug") -> float:
    """Return the value of an unlabelled series in Prometheus text."""
    for line in text.splitlines():
        if line.startswith(f"{prefix}:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no series {prefix}:{name}")


@contextmanager
def served(
    executor: FakeExecutor | None = None,
    *,
    parsers: Sequence[OutputParserFactory] = (),
    context: int = 4096,
    tokenizer: bool = True,
    ready: bool = True,
    plugins: Any = None,
    **config: Any,
) -> Iterator[Served]:
    one = Served(
        executor or FakeExecutor(),
        parsers,
        make_plan(context=context, **config),
        make_tokenizer() if tokenizer else None,
        plugins,
    )
    try:
        if ready:
            one.wait_ready()
        yield one
    finally:
        one.context.options = one.context.options.model_copy(update={"drain_timeout": 0.0})
        one.stop()
        one.join()
