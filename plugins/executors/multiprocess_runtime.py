"""Spawns the ranks, watches them, and moves message frames. No torch in this process.

Every frame is raw bytes on a pipe (``Connection.send_bytes``); nothing that crosses it is ever unpickled.
"""
from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import EngineDead
from glowplug.core.messages import Failed, Outbound, Progress, decode_outbound, encode
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.executors.rank_process import rank_main

if TYPE_CHECKING:
    from glowplug.plugins.executors.multiprocess import MultiprocessOptions

GRACE = 5.0  #: seconds a rank gets to end by itself before it is killed


class MultiprocessExecutor:
    """``Executor`` over spawned processes. ``submit`` may be called from another thread than ``outputs``."""

    def __init__(self, options: MultiprocessOptions, plan: EnginePlan, worker: Worker | None) -> None:
        self.options = options
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._early: list[Outbound] = []
        self._phase: dict[int, str] = {}
        self._heard = 0.0
        self._stopped = False
        self._dead: str | None = None
        self._sending = threading.Lock()
        self._meeting: tempfile.TemporaryDirectory[str] | None = None  # where several ranks find one another

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, plan: EnginePlan) -> None:
        """Spawn and wait until every rank is ready. EngineDead names rank, phase and reason."""
        context = multiprocessing.get_context("spawn")
        rendezvous = ""
        if plan.ranks > 1:
            self._meeting = tempfile.TemporaryDirectory(prefix="glowplug-")
            rendezvous = f"file://{self._meeting.name}/ranks"
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, name=f"glowplug-rank-{rank}", daemon=True,
                                      args=(theirs, plan.to_json(), rank, self.options.threads, rendezvous))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._await_ready(time.monotonic() + self.options.start_timeout)

    def _await_ready(self, deadline: float) -> None:
        ready: set[int] = set()
        while len(ready) < len(self._pipes):
            frame = self._receive(max(0.0, min(1.0, deadline - time.monotonic())))
            for message in frame or ():
                self._early.append(message)
                if isinstance(message, Progress) and message.phase == "ready":
                    ready.add(message.rank)
            if time.monotonic() > deadline:
                slow = sorted(set(range(len(self._pipes))) - ready)
                self._die(f"rank {slow[0]} was not ready after {self.options.start_timeout:.0f} s "
                          f"(phase {self._phase.get(slow[0], 'spawn')})")

    def _receive(self, timeout: float | None) -> list[Outbound] | None:
        """Messages of the ranks that have some, or None after ``timeout``. EngineDead when a rank is gone."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        pipes = list(self._pipes)
        found: list[Outbound] = []
        ready = wait(pipes, timeout)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                found.extend(self._noted(decode_outbound(pipe.recv_bytes())))
            except (EOFError, OSError):
                self._lost(rank)
        return found or None

    def _noted(self, messages: list[Outbound]) -> list[Outbound]:
        self._heard = time.monotonic()
        for message in messages:
            if isinstance(message, Progress):
                self._phase[message.rank] = message.phase
            elif isinstance(message, Failed):
                self._die(f"rank {message.rank} failed in phase {message.phase}: {message.reason}", message.traceback)
        return messages

    def _lost(self, rank: int) -> None:
        if self._stopped:
            raise EngineDead("the engine was stopped")
        process = self._processes[rank]
        process.join(1.0)
        self._die(f"rank {rank} ended (exit code {process.exitcode}) in phase {self._phase.get(rank, 'spawn')}")

    def _die(self, reason: str, traceback: str = "") -> None:
        self._dead = reason
        self._end_processes(grace=0.0)
        raise EngineDead(reason + (f"\n{traceback}" if traceback else ""))

    def submit(self, data: bytes) -> None:
        """To rank 0, which broadcasts."""
        with self._sending:
            try:
                self._pipes[0].send_bytes(data)
            except (BrokenPipeError, OSError):
                # NOTE: the reader sees the same end of the pipe and reports it with rank and phase.
                return

    def outputs(self, timeout: float | None) -> bytes | None:
        if self._early:
            early, self._early = self._early, []
            return encode(early)
        found = self._receive(timeout)
        if found is None:
            silent = time.monotonic() - self._heard
            if silent > self.options.watchdog:
                self._die(f"rank 0 has been silent for {silent:.0f} s (phase {self._phase.get(0)})")
            return None
        return encode(found)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._end_processes(GRACE)
            self._dead = self._dead or "the engine was stopped"

    def _end_processes(self, grace: float) -> None:
        """Closing the pipe asks a rank to end; it is killed after ``grace`` seconds."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(GRACE)
        if self._meeting is not None:
            self._meeting.cleanup()
