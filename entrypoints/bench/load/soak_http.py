"""``glowplug bench soak --requests N``: mixed HTTP requests to a server, with leak checks.

The server is a process of its own. In regular pauses nothing runs: every page must be free, and
after warm-up the server's processes must keep the number of their threads and open files, and
must not grow by more than ``--growth-per-request`` bytes of memory for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.http_stream import ServerTarget, call
from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.bench.load.soak_http_requests import ExchangeMix, WantedExchange
from glowplug.entrypoints.bench.load.soak_memory import WARM_UP_SHARE
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.process_memory import family

IN_FLIGHT = 16  #: requests at once without ``--in-flight``
IDLE_SECONDS = 60.0  #: time in which the server must be idle after the last answer
POLL_SECONDS = 0.1  #: seconds between two looks at a server that is not idle yet
SETTLING_SECONDS = 1.0  #: seconds in which ended connections and processes disappear
REQUEST_SECONDS = 300.0  #: time limit of one request
READ_BYTES = 256  #: size of one read of an answer
FAILURES_MAX = 20  #: failures that are kept


@dataclass
class ServerSample:
    """Memory, files, threads and pages of the server in one pause.

    Attributes:
        requests: requests answered so far.
        bytes: resident memory of all processes.
        files: open file descriptors of all processes.
        threads: threads of all processes.
        by_process: resident memory of each process, the server's first.
        pages: page counts that the engine reports, with an empty cache.
    """

    requests: int
    bytes: int
    files: int
    threads: int
    by_process: list[int]
    pages: dict[str, int]


def growth_per_request(samples: Sequence[ServerSample]) -> float:
    """Return the slope of memory over requests after warm-up, in bytes per request.

    The slope is that of the line of least squares; 0 for fewer than three samples.
    """
    late = judged(samples)
    if len(late) < 3:
        return 0.0
    mean_x = sum(one.requests for one in late) / len(late)
    mean_y = sum(one.bytes for one in late) / len(late)
    spread = sum((one.requests - mean_x) ** 2 for one in late)
    return sum((one.requests - mean_x) * (one.bytes - mean_y) for one in late) / spread


def judged(samples: Sequence[ServerSample]) -> Sequence[ServerSample]:
    """Return the samples after warm-up."""
    return samples[max(1, int(len(samples) * WARM_UP_SHARE)) :]


def held_by(pids: set[int]) -> tuple[int, int, int]:
    """Return (resident bytes, open files, threads) of processes, as /proc reports them."""
    resident = files = threads = 0
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        try:
            fields = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            resident += int(fields.get("VmRSS", "0 kB").split()[0]) << 10
            threads += int(fields["Threads"])
            files += len(list((folder / "fd").iterdir()))
        except (OSError, KeyError):
            continue  # the process has ended
    return resident, files, threads


class HttpSoak:
    """Mixed HTTP requests to one server, with checks; ``failures`` lists the failed ones.

    Args:
        url: the server's address.
        pid: the server's process.
        args: options of ``glowplug bench soak``.
        context: the server's context length.
        conditions: conditions of the measurement, for the record.
    """

    def __init__(
        self,
        url: str,
        pid: int,
        args: argparse.Namespace,
        context: int,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args
        self.samples: list[ServerSample] = []
        self.failures: list[str] = []
        self.ends: Counter[str] = Counter()
        self._target = ServerTarget(url, timeout=REQUEST_SECONDS)
        self._pid = pid
        self._mix = ExchangeMix(random.Random(args.load_seed), context)
        self._conditions = conditions or {}

    def run(self) -> None:
        """Send all requests, with a pause after each part of them."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        await self._pause()
        total, pauses = self.args.requests, self.args.pauses
        for index in range(pauses):
            await self._load(total * (index + 1) // pauses - total * index // pauses)
            await self._pause()

    async def _load(self, count: int) -> None:
        """Send ``count`` requests, at most ``--in-flight`` at once."""
        waiting = iter([self._mix.next() for _ in range(count)])

        async def worker() -> None:
            for wanted in waiting:
                await self._one(wanted)

        await asyncio.gather(*(worker() for _ in range(self.args.in_flight or IN_FLIGHT)))

    async def _one(self, wanted: WantedExchange) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                got = await self._exchange(wanted)
        except (OSError, TimeoutError) as error:
            self._fail(wanted, f"{type(error).__name__}: {error}")
            return
        self.ends[wanted.kind] += 1
        if wanted.read is not None:
            return
        status = int(got[9:12] or 0)
        if status != wanted.status:
            self._fail(wanted, f"status {status} instead of {wanted.status}: {got[-300:]!r}")
        elif wanted.ends not in got[-200:]:
            self._fail(wanted, f"the answer ends with {got[-200:]!r}")

    async def _exchange(self, wanted: WantedExchange) -> bytes:
        """Send a request and return the bytes of the answer that were read."""
        host, port, _, _ = self._target.address()
        reader, writer = await asyncio.open_connection(host, port)
        with closing(writer):
            head = f"POST {wanted.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(wanted.body)}\r\n\r\n"
            writer.write(head.encode() + wanted.body)
            await writer.drain()
            got = bytearray()
            while wanted.read is None or len(got) < wanted.read:
                piece = await reader.read(READ_BYTES)
                if not piece:
                    break
                got += piece
                if wanted.pause:
                    await asyncio.sleep(wanted.pause)
        return bytes(got)

    def _fail(self, wanted: WantedExchange, text: str) -> None:
        if len(self.failures) < FAILURES_MAX:
            self.failures.append(f"{wanted.kind}, {wanted.path}: {text}")

    async def _pause(self) -> None:
        """Check the pages and take a sample while nothing runs."""
        await self._idle_pages()
        await call(self._target, "POST", "/flush_cache")
        pages = await self._idle_pages(empty=True)
        await asyncio.sleep(SETTLING_SECONDS)
        pids = family(self._pid)
        resident, files, threads = held_by(pids)
        by_process = [held_by({pid})[0] for pid in sorted(pids)]
        sent = self.samples[-1].requests if self.samples else 0
        sent = max(sent, self.ends.total())
        self.samples.append(ServerSample(sent, resident, files, threads, by_process, pages))
        self.write()

    async def _idle_pages(self, empty: bool = False) -> dict[str, int]:
        """Wait until nothing runs or waits, and return the page counts.

        Args:
            empty: also wait until every page is free, as after a flush of the cache.

        Raises:
            TimeoutError: the server is not idle after ``IDLE_SECONDS``.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            stats = orjson.loads((await call(self._target, "GET", "/server_info"))[1])["stats"]
            used = stats["pages_total"] - stats["pages_free"] if empty else 0
            if not (stats["running"] or stats["waiting"] or used):
                return {
                    "free": stats["pages_free"],
                    "evictable": stats["pages_evictable"],
                    "total": stats["pages_total"],
                }
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not idle: {stats['running']} requests run, {stats['waiting']} wait, "
                    f"{stats['pages_free']} of {stats['pages_total']} pages are free"
                )
            await asyncio.sleep(POLL_SECONDS)

    def _leaks(self) -> list[str]:
        """Describe what has grown since the warm-up."""
        late = judged(self.samples)
        slope = growth_per_request(self.samples)
        found = []
        if slope > self.args.growth_per_request:
            found.append(f"memory grew by {slope:.0f} bytes per request")
        for name in ("files", "threads"):
            counts = [getattr(one, name) for one in late]
            if counts and counts[-1] > counts[0]:
                found.append(f"{name} grew from {counts[0]} to {counts[-1]}")
        return found

    def write(self, finished: bool = False) -> dict[str, Any]:
        """Return the results so far, and write them to the result file."""
        found = {
            **self._conditions,
            "finished": finished,
            "requests": self.ends.total(),
            "kinds": dict(sorted(self.ends.items())),
            "bytes_per_request": round(growth_per_request(self.samples), 1),
            "failures": [*self.failures, *(self._leaks() if finished else [])],
            "samples": [asdict(one) for one in self.samples],
        }
        if self.args.result_filename:
            report.write_json(Path(self.args.result_filename), found)
        return found


def run(args: argparse.Namespace, config: dict[str, Any], conditions: Mapping[str, Any]) -> int:
    """Start a server, send it ``--requests`` mixed requests and print the results of the checks.

    Args:
        args: options of ``glowplug bench soak``.
        config: the server's configuration.
        conditions: conditions of the measurement, for the record.

    Returns:
        Exit status 0 if all checks held, else 1.
    """
    with LocalServer(config) as server:
        target = ServerTarget(server.base_url, timeout=REQUEST_SECONDS)
        info = orjson.loads(asyncio.run(call(target, "GET", "/server_info"))[1])
        context = info["sizes"]["context_length"]
        soak = HttpSoak(server.base_url, server.pid, args, context, conditions)
        try:
            soak.run()
        except (OSError, TimeoutError, KeyError) as error:
            soak.failures.append(f"{type(error).__name__}: {error}")
        found = soak.write(finished=True)
    for key in ("requests", "kinds", "bytes_per_request", "failures"):
        print(report.line(key, found[key]))
    return 1 if found["failures"] else 0
