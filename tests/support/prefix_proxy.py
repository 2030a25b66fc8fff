"""A proxy that serves another server below a path prefix, and that can lose and change it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.support.waiting import LIMIT

#: headers of an answer that belong to one connection
OF_CONNECTION = {"transfer-encoding", "connection", "content-length", "date"}


class PrefixProxy:
    """A running proxy.

    Attributes:
        target: address of the server; "": connections are closed without an answer.
        url: address of the server behind the proxy, with a slash at the end.
    """

    def __init__(self, prefix: str, target: str) -> None:
        self.target = target
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass_on()

            def do_POST(self) -> None:
                self._pass_on()

            def _pass_on(self) -> None:
                if not proxy.target or not self.path.startswith(prefix + "/"):
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                kept = {k: v for k, v in self.headers.items() if k.lower() != "host"}
                url = proxy.target + self.path.removeprefix(prefix)
                answer = httpx.request(self.command, url, content=body, headers=kept, timeout=LIMIT)
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in OF_CONNECTION:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}{prefix}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def prefix_proxy(prefix: str, target: str) -> Iterator[PrefixProxy]:
    """Run a proxy within the context."""
    proxy = PrefixProxy(prefix, target)
    try:
        yield proxy
    finally:
        proxy.close()
