"""What runs in a spawned rank: build, then serve frames until the pipe closes.

NOTE: torch is imported inside ``rank_main`` only, because the spawning process imports this module too.
"""
from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from glowplug.core.messages import Failed, Outbound, Progress, encode
from glowplug.core.plan import EnginePlan

if TYPE_CHECKING:
    from glowplug.core.engine import Engine

BEAT = 1.0  #: seconds between signs of life
PR_SET_PDEATHSIG = 1


class RankPipe:
    """The rank's end of the pipe. Sends are serialised: the loop and the heartbeat share it."""

    def __init__(self, pipe: Connection, rank: int) -> None:
        self.pipe, self.rank = pipe, rank
        self.phase = "build"
        self.progressed = time.monotonic()
        self._lock = threading.Lock()

    def send(self, messages: list[Outbound]) -> None:
        with self._lock:
            self.pipe.send_bytes(encode(messages))

    def report(self, phase: str, done: int, total: int) -> None:
        self.phase = phase
        self.progressed = time.monotonic()
        self.send([Progress(self.rank, phase, done, total)])

    def beat_forever(self, limit: float) -> None:
        """Signs of life, withheld once the loop itself has not turned for ``limit`` seconds."""
        while True:
            time.sleep(BEAT)
            if time.monotonic() - self.progressed < limit:
                try:
                    self.send([Progress(self.rank, self.phase)])
                except (BrokenPipeError, OSError):
                    return


def rank_main(pipe: Connection, plan_json: bytes, rank: int, threads: int | None, rendezvous: str = "") -> None:
    """Entry of the spawned process. Ends when the parent closes the pipe or dies."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # NOTE: the front drains first, then closes the pipe.
    link = RankPipe(pipe, rank)
    try:
        plan = EnginePlan.from_json(plan_json)
        watchdog = float(plan.choice("executor").options.get("watchdog", 300.0))
        threading.Thread(target=link.beat_forever, args=(watchdog,), daemon=True).start()
        engine = _build(plan, rank, threads, link, rendezvous)
        try:
            _serve(engine, link)
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        failed = Failed(rank, link.phase, f"{type(error).__name__}: {error}", traceback.format_exc(limit=-12))
        try:
            link.send([failed])
        except (BrokenPipeError, OSError):
            pass
        raise SystemExit(1) from error


def _die_with_parent() -> None:
    """Linux: the kernel kills this rank when its parent ends, however it ends."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass
    if os.getppid() == 1:
        raise SystemExit(1)


def _build(plan: EnginePlan, rank: int, threads: int | None, link: RankPipe, rendezvous: str) -> Engine:
    import torch

    from glowplug.core.plugins import load_plugins_for
    from glowplug.core.worker import build_rank

    if threads is not None:
        torch.set_num_threads(threads)
    return build_rank(plan, rank, load_plugins_for(plan), link.report, rendezvous)


def _serve(engine: Engine, link: RankPipe) -> None:
    """The loop. Rank 0 drains its pipe, blocking only when there is nothing to do; the others follow its turns.

    Every rank that has something to tell the front sends it on its own pipe.
    """
    link.report("serve", 1, 1)
    while True:
        frames, gone = _drain(link.pipe, BEAT if engine.idle else 0.0) if engine.leads else ([], False)
        found = engine.turn(frames, stop=gone)
        if found is None:
            return
        link.progressed = time.monotonic()
        if found:
            link.send(found)


def _drain(pipe: Connection, timeout: float) -> tuple[list[bytes], bool]:
    """Frames that have come, after ``timeout`` seconds at most; whether the front has gone."""
    frames = []
    try:
        while pipe.poll(timeout):
            frames.append(pipe.recv_bytes())
            timeout = 0.0
    except (EOFError, OSError):
        return frames, True
    return frames, False
