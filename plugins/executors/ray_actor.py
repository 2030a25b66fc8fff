"""Ray actor of one rank: the rank's loop runs in a thread, and messages are bytes."""

from __future__ import annotations

import os
import threading
import time
from queue import Empty, SimpleQueue

import msgspec

from glowplug.core.plan.plan import EnginePlan
from glowplug.plugins.executors.ranks.failure_cause import BEAT
from glowplug.plugins.executors.ranks.host_identity import identity
from glowplug.plugins.executors.ranks.process import run_rank

FAILED_EXIT = 1  #: exit code of an actor that ends because its executor has gone


class Queues:
    """A rank's connection to its executor: a queue of frames received and one of frames to send."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        self._next: bytes | None = None
        self.outbox: SimpleQueue[bytes] = SimpleQueue()
        self.closed = False

    def put(self, data: bytes) -> None:
        self._inbox.put(data)

    def close(self) -> None:
        self.closed = True
        self._inbox.put(b"")

    def send_bytes(self, data: bytes) -> None:
        self.outbox.put(data)

    def poll(self, timeout: float) -> bool:
        """Return True if a frame arrives within ``timeout`` seconds.

        Raises:
            EOFError: the connection is closed and every frame has been read.
        """
        if self._next is None:
            try:
                self._next = (
                    self._inbox.get(timeout=timeout) if timeout > 0 else self._inbox.get_nowait()
                )
            except Empty:
                return False
        if self._next == b"":
            raise EOFError
        return True

    def recv_bytes(self) -> bytes:
        found = self._next
        self._next = None
        assert found is not None, "poll first"
        return found


class RankActor:
    """A Ray actor that runs one rank.

    The executor calls its methods through Ray, several at a time. Once started, the process ends
    itself when the executor has not polled for ``limit`` seconds, because the executor has then
    gone or cannot be reached.
    """

    def __init__(self, rank: int, limit: float) -> None:
        self._rank = rank
        self._limit = limit
        self._pipe = Queues()
        self._unpolled = 0

    def _end_alone(self) -> None:
        # NOTE: rounds of this loop are counted, not seconds: an import that holds the GIL stops
        # polls and rounds alike.
        while self._unpolled * BEAT < self._limit:
            self._unpolled += 1
            time.sleep(BEAT)
        os._exit(FAILED_EXIT)

    def identity(self, plan_json: bytes) -> bytes:
        """Return the facts of this host that must equal those of the executor's host, as JSON."""
        return identity(EnginePlan.from_json(plan_json))

    def place(self) -> tuple[str, int]:
        """Return (address of the host, process id)."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid()

    def start(self, plan_json: bytes, threads: int | None, rendezvous: str) -> None:
        threading.Thread(target=self._end_alone, daemon=True).start()
        threading.Thread(
            target=run_rank,
            args=(self._pipe, plan_json, self._rank, threads, rendezvous),
            daemon=True,
            name=f"glowplug-rank-{self._rank}",
        ).start()

    def submit(self, data: bytes) -> None:
        self._pipe.put(data)

    def close(self) -> None:
        """Close the rank's connection, so that the rank leaves its loop."""
        self._pipe.close()

    def poll(self, timeout: float) -> bytes:
        """Return the frames that arrive within ``timeout`` seconds, as one msgpack list."""
        self._unpolled = 0
        frames = []
        try:
            frames.append(self._pipe.outbox.get(timeout=timeout))
            while True:
                frames.append(self._pipe.outbox.get_nowait())
        except Empty:
            pass
        self._unpolled = 0
        return msgspec.msgpack.encode(frames)
