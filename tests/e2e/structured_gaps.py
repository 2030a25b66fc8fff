"""The time between tokens of other requests while a server is sent hostile grammars, in pairs.

``python -m tests.e2e.structured_record --part gaps --out x.json``. In one half of a pair, requests
stream while the hostile grammars arrive one after the other; in the other half the same number of
harmless requests arrive instead.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import psutil

from tests.e2e.served_faults import Server
from tests.support.hostile_grammars import HOSTILE
from tests.support.waiting import LIMIT

STREAMS = 2  #: requests that stream while others arrive
TOKENS = 400  #: of each of them; another one follows
SHORT = 16  #: tokens of an answer to a hostile grammar, or of a harmless request


class Streams:
    """Clients that stream one request after the other, and note the times between tokens."""

    def __init__(self, url: str) -> None:
        self.gaps: list[float] = []
        self._url = url
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._follow) for _ in range(STREAMS)]

    def _follow(self) -> None:
        body = {
            "text": "Tell me a story.",
            "stream": True,
            "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True},
        }
        while not self._ends.is_set():
            with httpx.stream("POST", self._url + "/generate", json=body, timeout=LIMIT) as answer:
                assert answer.status_code == 200
                last = 0.0
                for line in answer.iter_lines():
                    now = time.perf_counter()
                    if not line.startswith("data: {"):
                        continue
                    if last:
                        self.gaps.append(now - last)
                    last = now
                    if self._ends.is_set():
                        break

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def post(url: str, params: dict[str, Any]) -> httpx.Response:
    params = {"max_new_tokens": SHORT, **params}
    return httpx.post(
        url + "/generate", json={"text": "hi", "sampling_params": params}, timeout=LIMIT
    )


def hostile_half(url: str) -> tuple[list[float], list[float], list[int]]:
    """Send the hostile grammars; return the times between tokens, the seconds and the statuses."""
    seconds = []
    statuses = []
    with Streams(url) as streams:
        for name, value in HOSTILE:
            given = value if isinstance(value, str) else json.dumps(value)
            begun = time.perf_counter()
            statuses.append(post(url, {name: given}).status_code)
            seconds.append(time.perf_counter() - begun)
    return streams.gaps, seconds, statuses


def harmless_half(url: str, pauses: list[float]) -> list[float]:
    """Send a harmless request in place of each grammar; return the times between tokens."""
    with Streams(url) as streams:
        for pause in pauses:
            begun = time.perf_counter()
            assert post(url, {"ignore_eos": True}).status_code == 200
            time.sleep(max(0.0, pause - (time.perf_counter() - begun)))
    return streams.gaps


def memory(process: psutil.Process) -> int:
    """Return the bytes of a process and its children, shared pages counted once each."""
    return sum(one.memory_full_info().uss for one in [process, *process.children(recursive=True)])


def gaps(library: str, pairs: int) -> dict[str, Any]:
    """Measure ``pairs`` pairs, each with a new server, which has seen no grammar before."""
    rows: list[dict[str, Any]] = []
    seconds: list[float] = []  # of each hostile grammar in the pair before
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(Path(folder), "--grammar-backend", library, "--disable-radix-cache")
            try:
                server.ready()
                row, seconds = one_pair(server, seconds if number % 2 else [])
                rows.append(row)
            finally:
                server.process.terminate()
                server.process.wait()
        print(json.dumps(rows[-1]), flush=True)
    ratios = [row["p99_ms"]["with"] / row["p99_ms"]["without"] for row in rows]
    return {"p99_ratio": round(median(ratios), 3), "pairs": rows}


def one_pair(server: Server, before: list[float]) -> tuple[dict[str, Any], list[float]]:
    """Return the figures of a pair with the growth of memory, and the seconds of each grammar.

    Args:
        before: seconds between the harmless requests if these come first; []: they come second.
    """
    process = psutil.Process(server.process.pid)
    assert post(server.url, {"regex": "[ab]{3}"}).status_code == 200  # starts the workers
    start = memory(process)
    plain = harmless_half(server.url, before) if before else []
    hostile, seconds, statuses = hostile_half(server.url)
    grown = [memory(process) - start]
    plain = plain or harmless_half(server.url, seconds)
    for _ in range(2):
        hostile_half(server.url)
        grown.append(memory(process) - start)
    row = {
        "p99_ms": {"without": p99(plain), "with": p99(hostile)},
        "longest_ms": {"without": round(1e3 * max(plain), 1), "with": round(1e3 * max(hostile), 1)},
        "tokens": {"without": len(plain), "with": len(hostile)},
        "slowest_grammar_seconds": round(max(seconds), 2),
        "statuses": {str(one): statuses.count(one) for one in sorted(set(statuses))},
        "bytes_grown_after_1_2_3_rounds": grown,
    }
    return row, seconds


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return round(1e3 * float(np.percentile(seconds, 99)), 2)
