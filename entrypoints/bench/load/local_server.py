"""A ``glowplug serve`` process on a free port, for measurements that need a server."""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from glowplug.entrypoints.bench.others.turns import MeasuredProgram, answers, in_turns

MODEL = "bench"  #: the served model name
SERVER_PORTS = range(15_000, 32_000)  #: below Linux's usual ports of connections, from 32,768


class LocalServer:
    """Context manager that starts a server, waits until it is ready, and stops it on exit.

    ``with LocalServer({"model": "embedded"}) as server: ... server.base_url``. While it runs,
    ``pid`` is the id of its process.

    Raises:
        RuntimeError: the server ended, or was not ready in ``timeout`` seconds; with the end of its
            log.
    """

    def __init__(
        self, config: dict[str, Any], *, threads: int | None = None, timeout: float = 300.0
    ) -> None:
        self.config = config
        self.threads = threads
        self.timeout = timeout
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LocalServer:
        server = {
            **self.config.get("server", {}),
            "host": "127.0.0.1",
            "port": self.port,
            "served_model_name": MODEL,
        }
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="glowplug-bench-"))
            )
            (folder / "config.json").write_text(json.dumps({**self.config, "server": server}))
            start = partial(
                MeasuredProgram,
                "the server",
                [
                    sys.executable,
                    "-m",
                    "glowplug",
                    "serve",
                    "--config",
                    str(folder / "config.json"),
                ],
                folder / "log",
                {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {},
                lambda log: answers(f"{self.base_url}/ready"),
            )
            program = next(stack.enter_context(closing(in_turns([start], False, self.timeout))))
            program.check()
            self.pid = program.pid
            self._running = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.close()


def free_port() -> int:
    """Return a TCP port of this host that is free at the moment.

    The port is below those that the system gives to connections, so that no connection takes it
    before a server binds it. The same holds for the ports up to 300 above it, some of which SGLang
    takes.

    Raises:
        OSError: none of a hundred ports is free.
    """
    for port in random.Random().sample(SERVER_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port found from {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1}")
