"""A ``glowplug serve`` of our own on a free port, for measurements that need one."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

MODEL = "bench"  #: the name it serves under


class LocalServer:
    """``with LocalServer({"model": "embedded"}) as server: ... server.base_url``. Ready on entry, gone on exit.

    RuntimeError, with the end of its log, when it ends or is not ready in ``timeout`` seconds.
    """

    def __init__(self, config: dict[str, Any], *, threads: int | None = None, timeout: float = 300.0) -> None:
        self.config, self.threads, self.timeout = config, threads, timeout
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LocalServer:
        self._folder = tempfile.TemporaryDirectory(prefix="glowplug-bench-")
        folder = Path(self._folder.name)
        server = {**self.config.get("server", {}), "host": "127.0.0.1", "port": self.port, "served_model_name": MODEL}
        (folder / "config.json").write_text(json.dumps({**self.config, "server": server}))
        self._log = folder / "log"
        environment = dict(os.environ)
        if self.threads:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "glowplug", "serve", "--config", str(folder / "config.json")],
                stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop()

    def _wait(self) -> None:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urlopen(f"{self.base_url}/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError("the server did not become ready:\n" + self._log.read_text(errors="replace")[-3000:])

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()


def free_port() -> int:
    """Of this host, one that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
