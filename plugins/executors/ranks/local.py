"""Supervision of the rank processes of this host: spawning, receiving, watching and ending.

This process does not import torch. Every frame is raw bytes on a pipe
(``Connection.send_bytes``); no frame is ever unpickled.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.messages import Failed, Outbound, Progress, decode_outbound
from glowplug.plugins.executors.ranks.failure_cause import (
    QUIET,
    SETTLE,
    SPAWNING,
    FailureKind,
    Trouble,
    Watch,
    first_cause,
)
from glowplug.plugins.executors.ranks.process import BuildLoop, rank_main

logger = logging.getLogger("glowplug.engine")

GRACE = 5.0  #: seconds that a rank has to end by itself before it is killed
#: longest wait of one read of the pipes during ``settle``, in seconds
SETTLE_READ_SECONDS = 0.05
#: exit code of a rank's process whose import of the main script came to start an engine again
UNGUARDED_SCRIPT = 79
#: explanation of this exit code
UNGUARDED_TEXT = (
    "it imports the main script, which starts an engine again: put the code of the script under "
    'if __name__ == "__main__":'
)


class LocalRanks:
    """The rank processes that this process has spawned.

    One thread calls all methods; only ``send`` may be called from other threads.

    Attributes:
        watch: the observed state of the ranks. Failures are recorded there and never raised here.
    """

    def __init__(self, ranks: Sequence[int], watchdog: float, threads: int | None) -> None:
        self.ranks = tuple(ranks)
        self.watch = Watch(ranks, watchdog)
        self._threads = threads
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self._sending = threading.Lock()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def spawn(self, plan: EnginePlan, rendezvous: str, build: BuildLoop | None = None) -> None:
        """Start all processes; ``build``: see ``rank_main``.

        Raises:
            SystemExit: this process is itself a rank that still imports the main script.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(UNGUARDED_SCRIPT)
        context = multiprocessing.get_context("spawn")
        self.watch = Watch(self.ranks, self.watch.limit)
        for rank in self.ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                name=f"glowplug-rank-{rank}",
                daemon=True,
                args=(theirs, plan.to_json(), rank, self._threads, rendezvous, build),
            )
            process.start()
            theirs.close()
            self._processes[rank] = process
            self._pipes[rank] = ours

    def send(self, rank: int, data: bytes) -> None:
        """Send a frame to a rank. May be called from any thread."""
        with self._sending:
            try:
                self._pipes[rank].send_bytes(data)
            except (BrokenPipeError, OSError):
                # NOTE: the reader finds the pipe closed too and reports it with rank and phase.
                return

    def receive(self, timeout: float | None, also: Sequence[Connection] = ()) -> list[bytes]:
        """Wait for frames from the ranks and return those for the front end.

        Args:
            timeout: seconds to wait at most; None: no limit.
            also: other connections whose data end the wait.

        Returns:
            The frames; [] after the timeout, or if only heartbeats or data on ``also`` arrived.
        """
        frames: list[bytes] = []
        open_pipes = {pipe: rank for rank, pipe in self._pipes.items() if not pipe.closed}
        for pipe in wait([*open_pipes, *also], timeout):
            if pipe in open_pipes:
                assert isinstance(pipe, Connection)
                frames.extend(self._read(open_pipes[pipe], pipe))
        return frames

    def _read(self, rank: int, pipe: Connection) -> list[bytes]:
        try:
            frame = pipe.recv_bytes()
        except (EOFError, OSError):
            pipe.close()
            self._processes[rank].join(SETTLE)
            code = self._processes[rank].exitcode
            unguarded = code == UNGUARDED_SCRIPT and self.watch.phase(rank) == SPAWNING
            self.watch.ended(rank, UNGUARDED_TEXT if unguarded else f"exit code {code}")
            return []
        messages = decode_outbound(frame)
        self.watch.received(rank, messages)
        _log(messages)
        return [frame] if any(for_front(message) for message in messages) else []

    def settle(self) -> Trouble:
        """Read reports for a moment after the first failure, then return its first cause."""
        deadline = time.monotonic() + SETTLE
        while (
            first_cause(self.watch.troubles).kind != FailureKind.ENDED
            and time.monotonic() < deadline
        ):
            if all(pipe.closed for pipe in self._pipes.values()):
                break
            self.receive(SETTLE_READ_SECONDS)
        if first_cause(self.watch.troubles).kind >= FailureKind.STUCK:
            self.watch.look(QUIET)
        return first_cause(self.watch.troubles)

    def end(self, grace: float) -> None:
        """Close the pipes, so that the ranks end, and kill those that run after ``grace`` seconds.

        Idempotent.
        """
        for pipe in self._pipes.values():
            with self._sending:
                pipe.close()
        deadline = time.monotonic() + grace
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(GRACE)


def _log(messages: Sequence[Outbound]) -> None:
    """Log the notes that starting ranks send: rank 0's at level INFO, other ranks' at DEBUG."""
    for message in messages:
        if isinstance(message, Progress) and message.note:
            logger.log(
                logging.DEBUG if message.rank else logging.INFO,
                "rank %d: %s",
                message.rank,
                message.note,
            )


def for_front(message: Outbound) -> bool:
    """Return True if the front end needs the message.

    Failures are left out, because the executor reports them. Bare heartbeats are left out too,
    except rank 0's, which show the front end that the engine is alive.
    """
    if isinstance(message, Progress):
        return message.rank == 0 or message.total > 0
    return not isinstance(message, Failed)
