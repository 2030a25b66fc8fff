"""``glowplug serve``: bind, load, serve, drain.

The port is bound before anything is loaded, so a port in use is reported at once. From then on the
server answers /health. /ready and all work return 503 until every rank is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import uvicorn

from glowplug.core.config.operation_options import LogOptions
from glowplug.core.errors import GlowplugError, PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import ServerOptions
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Executor, OutputParserFactory
from glowplug.core.startup.garbage import settle_memory
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.cli import exit_codes
from glowplug.entrypoints.front import event_loop
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.front.follow import follow
from glowplug.entrypoints.front.model_text import eos_ids, open_tokenizer
from glowplug.entrypoints.front.named_parsers import build_parsers
from glowplug.entrypoints.front.open_engine import make_executor, start_executor
from glowplug.entrypoints.server.app import create_app
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.logs import set_up_logging, stats_lines
from glowplug.entrypoints.server.plugin_routes import ServerHandle, serves_websockets
from glowplug.entrypoints.server.transport.http_protocol import GuardedProtocol

logger = logging.getLogger("glowplug.server")

FINAL_RESPONSE_SECONDS = 2.0  #: time to send responses after the engine has stopped
#: Python's thread switch interval (default 5 ms), which delays the thread that reads engine frames
SWITCH_INTERVAL_SECONDS = 0.0005
KEEP_ALIVE_SECONDS = 75  #: time after which an idle connection is closed


def main(plan: EnginePlan, plugins: PluginSet) -> int:
    """Run the engine and serve HTTP until a signal or a failure.

    A host that contributes only ranks runs no HTTP server: see ``follow``.

    Returns:
        0 after a drain; 1 if the port is in use, loading fails or the engine dies; 2 if hosts have
        different plans, before anything is loaded.
    """
    options = ServerOptions.model_validate(plan.config.get("server", {}))
    log = LogOptions.model_validate(plan.config.get("log", {}))
    executor = make_executor(plan, plugins)
    if not executor.leads:
        set_up_logging(log)
        _exit_process(follow(plan, plugins, executor))
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        print(
            f"glowplug: cannot listen on {options.host}:{options.port}: {error.strerror or error} "
            "| fix: set --host to an address of this machine and --port to a free port",
            file=sys.stderr,
        )
        return 1
    set_up_logging(log)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    with listener:
        tokenizer = open_tokenizer(plan, plugins)
        parsers = build_parsers(plan, plugins)
        code = serve_until_done(
            plan,
            tokenizer,
            parsers,
            listener=listener,
            plugins=plugins,
            log=log,
            make=lambda: start_executor(plan, plugins, executor),
            progress=lambda: getattr(executor, "progress", {}),
        )
    if code:
        _exit_process(code)
    return code


def _exit_process(code: int) -> NoReturn:
    """End the process at once, after flushing logs and standard streams.

    NOTE: a thread may still be waiting for a host behind a broken link. Shutting torch down beside
    that thread takes seconds.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve_until_done(
    plan: EnginePlan,
    tokenizer: Tokenizer | None,
    parsers: Sequence[OutputParserFactory],
    *,
    listener: socket.socket,
    make: Callable[[], Executor],
    plugins: Any = None,
    log: LogOptions | None = None,
    progress: Callable[[], Mapping[int, str]] = dict,
) -> int:
    """Call :func:`run` in a new event loop and return its exit code.

    If ``make`` is still loading when the server ends, this function ends the process.

    Args:
        progress: returns the start-up phase of each rank while ``make`` loads.

    The other arguments are those of :func:`run`.
    """
    loading = threading.Event()

    def load() -> Executor:
        loading.set()
        try:
            return make()
        finally:
            loading.clear()

    async def serve() -> int:
        client = EngineClient(plan, tokenizer, eos_ids(plan, tokenizer), progress)
        code = await run(
            plan, client, tokenizer, parsers, listener=listener, make=load, plugins=plugins, log=log
        )
        if loading.is_set():
            # NOTE: the loading thread cannot be stopped, and closing the loop would wait for it.
            # Ranks end when their pipe closes.
            logging.shutdown()
            os._exit(code)
        return code

    return event_loop.run(serve())


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at ``host`` and ``port``.

    Raises:
        OSError: the port is in use, or the address is not one of this machine.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # NOTE: with SO_REUSEADDR two sockets can bind the same port until one listens. Listen
        # now, so that a second server fails here.
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


async def run(
    plan: EnginePlan,
    client: EngineClient,
    tokenizer: Tokenizer | None,
    parsers: Sequence[OutputParserFactory] = (),
    *,
    listener: socket.socket,
    make: Callable[[], Executor] | None = None,
    plugins: Any = None,
    log: LogOptions | None = None,
) -> int:
    """Serve until a signal or until the engine dies.

    Args:
        plan: the engine's plan.
        client: the engine's client.
        tokenizer: None if the engine runs without one.
        parsers: the plan's output parsers, in order.
        listener: socket on which to serve.
        make: starts the executor; None: the client is already started.
        plugins: the PluginSet whose ``extend_app`` hooks are called; None: none.
        log: section ``log`` of the configuration; None: defaults.

    Returns:
        The exit code.
    """
    app = create_app(plan, client, tokenizer, parsers, plugins)
    server = HttpServer(app, app.state.context, listener)
    stats = asyncio.create_task(stats_lines(client, log or LogOptions.model_validate({})))
    try:
        return await server.run(make)
    finally:
        stats.cancel()


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without its signal handlers, since ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class HttpServer:
    """One run of the HTTP server and its engine: start, signals, failure of the engine, drain."""

    def __init__(self, app: Any, context: Context, listener: socket.socket) -> None:
        self._context = context
        self._client = context.client
        self._handle: ServerHandle = app.state.handle
        self._listener = listener
        self._http = _Uvicorn(
            uvicorn.Config(
                app,
                http=partial(GuardedProtocol, log=context.log),  # type: ignore[arg-type]
                ws="auto" if serves_websockets(app) else "none",
                ws_max_size=context.options.max_body_bytes,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(FINAL_RESPONSE_SECONDS),
            )
        )
        self._signalled = asyncio.Event()
        self._failed = exit_codes.FAILED

    async def run(self, make: Callable[[], Executor] | None) -> int:
        """Serve until a signal or until the engine dies, and return the exit code."""
        with self._signals():
            for act in self._handle.starts:
                await act()
            http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
            try:
                return await self._supervise(http, make)
            finally:
                self._http.should_exit = True
                await http
                await self._client.close()
                self._context.texts.close()
                self._context.grammars.close()
                for act in reversed(self._handle.stops):
                    await act()
                self._context.observers.close()

    async def _supervise(
        self, http: asyncio.Task[None], make: Callable[[], Executor] | None
    ) -> int:
        """Start the engine, wait for a signal or the engine's end, and return the exit code."""
        host, port = self._listener.getsockname()[:2]
        logger.info("listening on http://%s:%d (not ready yet)", host, port)
        starting = asyncio.create_task(self._start(make))
        waits = {
            http,
            asyncio.create_task(self._signalled.wait()),
            asyncio.create_task(self._client.wait_dead()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits - {http}:
                task.cancel()
        if self._signalled.is_set():
            return await self._drain()
        await asyncio.gather(starting, return_exceptions=True)
        logger.error("the engine has stopped: %s", self._client.reason)
        await self._context.jobs.wait_idle(FINAL_RESPONSE_SECONDS)
        return self._failed

    async def _start(self, make: Callable[[], Executor] | None) -> None:
        """Start the engine with ``make``. None: the client is already started.

        NOTE: a failure sets the client's state to dead with the reason, which ends ``_supervise``.
        """
        if make is not None:
            try:
                await self._client.start(make)
            except PlanRefused:
                self._failed = exit_codes.REFUSED
                return
            except GlowplugError:
                return
            except Exception:
                logger.exception("starting the engine failed")
                return
        settle_memory()
        host, port = self._listener.getsockname()[:2]
        logger.info("ready: %s on http://%s:%d/v1", self._context.model_name, host, port)

    async def _drain(self) -> int:
        """Wait for running requests, at most ``server.drain_timeout`` seconds, and return 0.

        Requests that still run then are aborted.
        """
        limit = self._context.options.drain_timeout
        running = self._context.jobs.running
        logger.info(
            "draining %d request%s, at most %.0f s; a second signal exits at once",
            running,
            "" if running == 1 else "s",
            limit,
        )
        if self._client.state != "starting" and not await self._client.drain(limit):
            logger.warning("drain timeout: the requests still running are aborted")
            await self._client.abort_all()
        await self._context.jobs.wait_idle(FINAL_RESPONSE_SECONDS)
        logger.info("drained; the server stops")
        return 0

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Call ``stop`` on SIGTERM and SIGINT within the context.

        Only the main thread can handle signals; in other threads nothing is changed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Start to drain; on a second call exit at once.

        Ranks end by themselves when their pipe closes.
        """
        if self._signalled.is_set():
            logger.warning("second signal: exiting at once")
            os._exit(exit_codes.SECOND_SIGNAL)
        self._context.draining = True
        self._signalled.set()
