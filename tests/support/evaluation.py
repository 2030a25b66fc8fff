"""A small OpenAI server with given answers, and question files, to test ``glowplug eval``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Reply = tuple[int, Any]  #: HTTP status and JSON body


def completion(text: str, tokens: int = 3) -> Reply:
    """Return the reply of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"completion_tokens": tokens}}


def chat(text: str, reasoning: str | None = None) -> Reply:
    """Return the reply of a chat completion."""
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    return 200, {"choices": [{"index": 0, "message": message}], "usage": {"completion_tokens": 2}}


class ScriptedServer:
    """A server whose answers a function of the request's body gives.

    Attributes:
        url: the server's address.
        bodies: bodies of the requests in order of arrival.
        most: most requests in flight at a time.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Reply | None], key: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most = 0
        self._answer = answer
        self._key = key
        self._flying = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                return None

            def do_GET(self) -> None:
                self._send(outer.checked(self.headers, lambda: (200, {"data": [{"id": "served"}]})))

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(size))
                self._send(outer.checked(self.headers, lambda: outer.reply(body)))

            def _send(self, reply: Reply | None) -> None:
                if reply is None:  # the connection is closed without an answer
                    return
                data = json.dumps(reply[1]).encode()
                self.send_response(reply[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def checked(self, headers: Any, answer: Callable[[], Reply | None]) -> Reply | None:
        """Return the reply, or a refusal of the key."""
        if self._key and headers.get("Authorization") != f"Bearer {self._key}":
            return 401, {"error": {"message": "the key is wrong"}}
        return answer()

    def reply(self, body: dict[str, Any]) -> Reply | None:
        """Return the reply to a request, and count it."""
        with self._lock:
            self.bodies.append(body)
            self._flying += 1
            self.most = max(self.most, self._flying)
        time.sleep(0.01)
        try:
            return self._answer(body)
        finally:
            with self._lock:
                self._flying -= 1

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def scripted(
    answer: Callable[[dict[str, Any]], Reply | None], key: str = ""
) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer, key)
    server.start()
    try:
        yield server
    finally:
        server.stop()


#: names, numbers and things of the questions made by ``write_gsm8k``
PEOPLE = ("Ada", "Ben", "Cleo", "Dora", "Emil")


def write_gsm8k(path: Path, count: int = 20) -> list[int]:
    """Write questions in gsm8k's published format, and return their answers."""
    lines = []
    answers = []
    for number in range(count):
        name = PEOPLE[number % len(PEOPLE)]
        boxes = 3 + number
        each = 400 + 7 * number
        total = boxes * each
        working = f"{name} has {boxes} * {each} = <<{boxes}*{each}={total}>>{total:,} pens."
        lines.append(
            {
                "question": f"{name} has {boxes} boxes with {each} pens each. How many pens is "
                "that?",
                "answer": f"{working}\n#### {total:,}",
            }
        )
        answers.append(total)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return answers


def write_mmlu(folder: Path) -> None:
    """Write two subjects in MMLU's published layout, with commas and line breaks in quotes."""
    for part in ("dev", "test"):
        (folder / part).mkdir(parents=True)
    rows = {
        "abstract_algebra": [
            '"Find the order of 2, in Z_4.",1,2,3,4,B',
            '"A set\nof two lines",x,"y, z",w,v,C',
        ],
        "virology": [
            "Which is a virus?,ant,bee,flu,oak,C",
            "And which is a tree?,ant,bee,flu,oak,D",
        ],
    }
    for subject, lines in rows.items():
        (folder / "dev" / f"{subject}_dev.csv").write_text("\n".join(lines[:1]) + "\n")
        (folder / "test" / f"{subject}_test.csv").write_text("\n".join(lines) + "\n")
