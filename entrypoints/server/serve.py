"""``glowplug serve``: bind, load, serve, drain.

The port is bound before anything is loaded, so a taken port costs nothing; it answers /health from
then on, while /ready and all work say 503 until every rank is ready.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import uvicorn

from glowplug.core.errors import GlowplugError, PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import LogOptions, ServerOptions
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Executor, OutputParserFactory, Worker
from glowplug.core.startup.components import build_component
from glowplug.core.startup.garbage import settle_memory
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.cli import exit_codes
from glowplug.entrypoints.front import event_loop
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.front.follow import follow
from glowplug.entrypoints.front.model_text import eos_ids, open_tokenizer
from glowplug.entrypoints.front.open_engine import make_executor, start_executor
from glowplug.entrypoints.server.app import create_app
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.logs import set_up_logging, stats_lines
from glowplug.entrypoints.server.transport.http_protocol import GuardedProtocol

logger = logging.getLogger("glowplug.server")

LAST_WORDS = 2.0  #: seconds for answers on their way out once the engine has stopped
#: seconds after which the thread that reads the engine's frames gets its turn; Python's own is 5 ms
SWITCH = 0.0005
KEEP_ALIVE = 75  #: seconds an idle connection is kept


def main(plan: EnginePlan, plugins: PluginSet) -> int:
    """Serve until a signal. Exit code 0 after a drain, 1 when the port is taken, loading fails or
    the engine dies, 2 when hosts do not agree and nothing was loaded.

    On a host that only lends its ranks there is no HTTP: see ``follow``.
    """
    options = ServerOptions.model_validate(plan.config.get("server", {}))
    log = LogOptions.model_validate(plan.config.get("log", {}))
    executor = make_executor(plan, plugins)
    if not executor.leads:
        set_up_logging(log)
        _leave(follow(plan, plugins, executor))
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        print(
            f"glowplug: cannot listen on {options.host}:{options.port}: {error.strerror or error} | fix: an address "
            "of this machine (--host) and a port that is free (--port)",
            file=sys.stderr,
        )
        return 1
    set_up_logging(log)
    sys.setswitchinterval(SWITCH)
    with listener:
        tokenizer = open_tokenizer(plan, plugins)
        parsers = [
            build_component(plugins, choice, plan, Worker())
            for choice in plan.choices_in("outputs")
        ]
        code = serve_until_done(
            plan,
            tokenizer,
            parsers,
            listener=listener,
            plugins=plugins,
            log=log,
            make=lambda: start_executor(plan, plugins, executor),
        )
    if code:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End the process at once, everything said and closed.

    NOTE: a thread may wait for a host behind a broken link, and taking torch down around it takes
    seconds.
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
) -> int:
    """:func:`run` in a loop of its own. Ends the process itself when a signal came while ``make``
    was still loading.
    """
    loading = threading.Event()

    def load() -> Executor:
        loading.set()
        try:
            return make()
        finally:
            loading.clear()

    async def serve() -> int:
        client = EngineClient(plan, tokenizer, eos_ids(plan, tokenizer))
        code = await run(
            plan, client, tokenizer, parsers, listener=listener, make=load, plugins=plugins, log=log
        )
        if loading.is_set():
            # NOTE: a thread cannot be stopped and leaving the loop would wait for it; ranks end
            # when their pipe closes.
            logging.shutdown()
            os._exit(code)
        return code

    return event_loop.run(serve())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. OSError when the port is taken or the address is not ours."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # NOTE: two sockets may bind one port with SO_REUSEADDR as long as neither listens, so
        # listen now.
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
    """Serve on ``listener`` until a signal or the engine's death; returns the exit code.

    ``make`` starts the executor (None: the client is started already).
    """
    app = create_app(plan, client, tokenizer, parsers, plugins)
    server = Server(app, app.state.context, listener)
    stats = asyncio.create_task(stats_lines(client, log or LogOptions.model_validate({})))
    try:
        return await server.run(make)
    finally:
        stats.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One run of the HTTP server around one engine: start, signals, death of the engine, drain."""

    def __init__(self, app: Any, context: Context, listener: socket.socket) -> None:
        self._context = context
        self._client = context.client
        self._listener = listener
        self._http = _Uvicorn(
            uvicorn.Config(
                app,
                http=partial(GuardedProtocol, log=context.log),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(LAST_WORDS),
            )
        )
        self._signalled = asyncio.Event()
        self._failed = exit_codes.FAILED

    async def run(self, make: Callable[[], Executor] | None) -> int:
        with self._signals():
            http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
            try:
                return await self._supervise(http, make)
            finally:
                self._http.should_exit = True
                await http
                await self._client.close()
                self._context.texts.close()

    async def _supervise(
        self, http: asyncio.Task[None], make: Callable[[], Executor] | None
    ) -> int:
        """Returns the exit code once it is time to stop."""
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
        await self._context.jobs.wait_idle(LAST_WORDS)
        return self._failed

    async def _start(self, make: Callable[[], Executor] | None) -> None:
        """NOTE: a failure is not lost: the client turns dead with the reason, which ends
        ``_supervise``.
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
        """Running work finishes, up to the limit; what is left then ends with finish reason
        "abort".
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
            logger.warning("the drain timeout is over: what still runs is aborted")
            await self._client.abort_all()
        await self._context.jobs.wait_idle(LAST_WORDS)
        logger.info("drained: the server ends")
        return 0

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
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
        """First call: drain. Second: exit now; ranks end by themselves when their pipe closes."""
        if self._signalled.is_set():
            logger.warning("second signal: exiting at once")
            os._exit(exit_codes.SECOND_SIGNAL)
        self._context.draining = True
        self._signalled.set()
