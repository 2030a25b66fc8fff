"""The main function of a rank's process: build the rank, then serve until the pipe closes.

NOTE: torch is imported inside ``run_rank`` only, because the spawning process imports this module
too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

from glowplug.core.engine.blame import failure_of, running_call
from glowplug.core.errors import CollectiveError, PlanRefused, WeightError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.startup.garbage import settle_memory
from glowplug.core.step.messages import Failed, Outbound, Progress, RunningCall, encode
from glowplug.plugins.executors.ranks.failure_cause import BEAT, ENDED, LOADED

NOTE_SECONDS = 10.0  #: seconds after which the log says where a loop stands still
SPIN_COUNT = "3000"  #: iterations of libgomp's waiting loop, about 10 microseconds
PR_SET_PDEATHSIG = 1  #: Linux's number of this operation of prctl


class Pipe(Protocol):
    """A rank's end of the connection between the rank and its executor.

    Its methods raise EOFError or OSError once the other end has gone.
    """

    def send_bytes(self, data: bytes) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def poll(self, timeout: float) -> bool: ...


class RankLoop(Protocol):
    """The loop of a rank's process; normally the ``Engine``, whose attributes and methods it has.

    Attributes:
        collectives: the rank's collectives.
        leads: True: this is rank 0, which receives the front end's frames.
        idle: True: the loop has no work until the next frame.
    """

    collectives: Any

    @property
    def leads(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def turn(self, frames: Sequence[bytes] = (), stop: bool = False) -> list[Outbound] | None: ...

    def close(self) -> None: ...


#: function with the arguments of ``core.startup.build_rank.build_rank`` that returns a rank's loop.
#: A process imports it by its module and name.
BuildLoop = Callable[..., RankLoop]


class RankLink:
    """Sender of a rank's reports and heartbeats to its executor, over the pipe.

    The rank's loop and the heartbeat thread share the pipe, so sends are serialised.

    Attributes:
        phase: the current phase.
        loop: identifier of the thread that runs the rank.
        progressed: time of the last turn of the loop or progress report.
        waits_in: names of the modules in which a rank waits for other ranks.
        plan: the plan, whose components failures name; None until it is read.
        sources: the loaded plugins, whose hooks failures name.
    """

    def __init__(self, pipe: Pipe, rank: int) -> None:
        self.pipe = pipe
        self.rank = rank
        self.phase = "build"
        self.loop = threading.get_ident()
        self.progressed = time.monotonic()
        self.waits_in: frozenset[str] = frozenset()
        self.plan: EnginePlan | None = None
        self.sources: Sequence[PluginSource] = ()
        self._lock = threading.Lock()

    def send(self, messages: list[Outbound]) -> None:
        with self._lock:
            self.pipe.send_bytes(encode(messages))

    def report(self, phase: str, done: int, total: int) -> None:
        self.phase = phase
        self.progressed = time.monotonic()
        self.send([Progress(self.rank, phase, done, total)])

    def note(self, text: str) -> None:
        self.send([Progress(self.rank, self.phase, note=text)])

    def failed(self, error: BaseException) -> None:
        """Report a failure; called while ``error`` is handled.

        Errors that the operator can correct (WeightError, PlanRefused) are reported without a
        stack: their text has the fix.
        """
        consequence = isinstance(error, CollectiveError)
        reason = failure_of(error, self.plan, self.phase)
        stack = (
            "" if isinstance(error, (WeightError, PlanRefused)) else traceback.format_exc(limit=-12)
        )
        self.send([Failed(self.rank, self.phase, reason, stack, consequence)])

    def beat_forever(self, limit: float) -> None:
        """Send a heartbeat every BEAT seconds, and report a failure once the loop stands still.

        While the rank loads, heartbeats state the component's call in which it is. A loop that
        stands still is reported in the log before the limit.

        Args:
            limit: seconds without a turn of the loop that count as a failure. The limit does not
                apply while the rank loads.
        """
        noted = -1.0
        try:
            while self.phase != ENDED:
                still = time.monotonic() - self.progressed
                if self.phase == "serve" and still > limit:
                    self.send([self._stuck(still)])
                    return
                if self.phase == "serve" and still > NOTE_SECONDS and noted != self.progressed:
                    noted = self.progressed
                    self.note(self._stuck(still).reason)
                call = None if self.phase in LOADED else self._call(self._stack())
                self.send([Progress(self.rank, self.phase, call=call)])
                time.sleep(BEAT)
        except (EOFError, OSError):
            return

    def _stuck(self, still: float) -> Failed:
        """Return the failure message of a loop that has stood still for ``still`` seconds.

        The message is marked as a consequence of another rank's failure if this rank waits in a
        collective.
        """
        frames = self._stack()
        waits = any(frame.f_globals.get("__name__") in self.waits_in for frame in frames)
        place = frames[0].f_code if frames else None
        where = (
            f"in {place.co_qualname} of {os.path.basename(place.co_filename)}"
            if place
            else "nowhere"
        )
        stack = "".join(traceback.format_stack(frames[0], 12)) if frames else ""
        call = self._call(frames)
        reason = f"its loop has stood still for {still:.0f} s, {where}"
        if call is not None:
            reason += (
                f"; it waits for {call} to return\n    fix: {call.fix}, or allow longer steps "
                "(executor.watchdog)"
            )
        return Failed(self.rank, self.phase, reason, stack, consequence=waits, stuck=True)

    def _stack(self) -> list[FrameType]:
        """Return the stack of the thread that runs the rank, the innermost frame first."""
        found = []
        frame = sys._current_frames().get(self.loop)
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found

    def _call(self, frames: list[FrameType]) -> RunningCall | None:
        """Return the call of a plugin's code in ``frames``, the innermost frame first."""
        if self.plan is None:
            return None
        return running_call(frames[::-1], self.plan, self.sources)


def rank_main(
    pipe: Connection,
    plan_json: bytes,
    rank: int,
    threads: int | None,
    rendezvous: str = "",
    build: BuildLoop | None = None,
) -> None:
    """Run a rank in the spawned process until the parent closes the pipe or dies.

    ``build``: function that builds the rank's loop; None: ``build_rank``, which builds an engine.
    """
    _die_with_parent()
    _shorten_spinning()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # NOTE: on SIGTERM the front end drains first, then closes the pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not run_rank(pipe, plan_json, rank, threads, rendezvous, build):
        raise SystemExit(1)


def _shorten_spinning() -> None:
    """Make waiting threads of torch spin for microseconds instead of milliseconds.

    Spinning threads would take the core that the front end needs. Settings in the user's
    environment take precedence.

    NOTE: libgomp reads its environment once, when torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def run_rank(
    pipe: Pipe,
    plan_json: bytes,
    rank: int,
    threads: int | None,
    rendezvous: str,
    build: BuildLoop | None = None,
) -> bool:
    """Build a rank and run its loop in the calling thread until the engine ends.

    ``build``: see ``rank_main``.

    Returns:
        False if the rank failed; it has then reported the failure.
    """
    link = RankLink(pipe, rank)
    engine: RankLoop | None = None
    try:
        plan = link.plan = EnginePlan.from_json(plan_json)
        watchdog = float(plan.choice("executor").options.get("watchdog", 300.0))
        threading.Thread(
            target=link.beat_forever, args=(watchdog,), daemon=True, name="glowplug-beat"
        ).start()
        engine = _build(plan, rank, threads, link, rendezvous, build)
        link.waits_in = waiting_modules(engine.collectives, plan.ranks)
        _serve(engine, link)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return True
    except Exception as error:
        try:
            link.failed(error)
        except (EOFError, OSError):
            pass
        return False
    finally:
        if engine is not None:
            engine.close()
    return True


def _die_with_parent() -> None:
    """Make the Linux kernel kill this process when its parent ends for any reason."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass
    if os.getppid() == 1:
        raise SystemExit(1)


def _build(
    plan: EnginePlan,
    rank: int,
    threads: int | None,
    link: RankLink,
    rendezvous: str,
    build: BuildLoop | None,
) -> RankLoop:
    import torch

    from glowplug.core.startup.build_rank import build_rank
    from glowplug.core.startup.components import load_plugins_for

    if threads is not None:
        torch.set_num_threads(threads)

    def report(phase: str, done: int, total: int) -> None:
        if phase == "ready":
            settle_memory()
        link.report(phase, done, total)

    plugins = load_plugins_for(plan)
    link.sources = plugins.sources
    return (build or build_rank)(plan, rank, plugins, report, rendezvous, link.note)


def waiting_modules(collectives: object, ranks: int) -> frozenset[str]:
    """Return the names of the modules in which one of several ranks waits for the others.

    These are the modules of the collectives' class and its bases, and that in which a rank waits
    for its device, whose kernels wait for the other ranks' data.
    """
    from glowplug.core.engine.in_flight import InFlight

    kinds = [kind for kind in type(collectives).__mro__ if kind is not object]
    return frozenset(kind.__module__ for kind in [*kinds, *([InFlight] if ranks > 1 else [])])


def _serve(engine: RankLoop, link: RankLink) -> None:
    """Run the rank's loop until the front end leaves or stops the engine.

    Rank 0 reads its pipe and blocks only when the engine is idle. The other ranks follow rank 0's
    turns. Every rank sends its messages for the front end on its own pipe.
    """
    link.report("serve", 1, 1)
    while True:
        frames, gone = (
            _drain(link.pipe, BEAT if engine.idle else 0.0) if engine.leads else ([], False)
        )
        found = engine.turn(frames, stop=gone)
        if found is None:
            link.report(ENDED, 1, 1)
            return
        link.progressed = time.monotonic()
        if found:
            link.send(found)


def _drain(pipe: Pipe, timeout: float) -> tuple[list[bytes], bool]:
    """Read the frames that have arrived, waiting at most ``timeout`` seconds for the first one.

    Returns:
        (frames, True if the front end has gone).
    """
    frames = []
    try:
        while pipe.poll(timeout):
            frames.append(pipe.recv_bytes())
            timeout = 0.0
    except (EOFError, OSError):
        return frames, True
    return frames, False
