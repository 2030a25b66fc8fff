"""Runtime of the inline executor: each call of ``outputs`` runs a turn of the engine."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from glowplug.core.engine.blame import failure_of
from glowplug.core.errors import EngineDead, GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.startup.components import load_plugins_for
from glowplug.core.startup.garbage import INLINE_ENGINES
from glowplug.core.step.messages import Outbound, Progress, encode

if TYPE_CHECKING:
    from glowplug.core.engine.engine import Engine
    from glowplug.core.startup.memory_gauge import Gauge
    from glowplug.plugins.executors.inline import InlineOptions

log = logging.getLogger("glowplug")


class InlineExecutor:
    """The ``Executor`` that runs a single rank in the calling process.

    ``submit`` and ``outputs`` may be called from different threads.
    """

    leads = True

    def __init__(self, options: InlineOptions, plan: EnginePlan, worker: Worker | None) -> None:
        self.options = options
        self.phase = "build"
        self._plan = plan
        self._inbox: deque[bytes] = deque()
        self._wake = threading.Event()
        self._engine: Engine | None = None
        self._progress: list[Outbound] = []
        self._dead: str | None = None

    def start(self, plan: EnginePlan, build: Callable[..., Engine] | None = None) -> None:
        """Build the rank in the calling thread.

        Args:
            plan: the plan.
            build: function that builds the rank, with the first four arguments of ``build_rank``;
                None: ``build_rank``.

        Raises:
            EngineDead: the rank failed; the message has phase and reason.
        """
        from glowplug.core.startup.build_rank import build_rank

        try:
            self._engine = (build or build_rank)(plan, 0, load_plugins_for(plan), self._report)
        except GlowplugError:
            raise
        except Exception as error:
            reason = failure_of(error, plan, self.phase)
            raise EngineDead(f"rank 0 failed in phase {self.phase}: {reason}") from error
        if self._gauge(self._engine).measures:
            INLINE_ENGINES.opened(self._engine)

    @staticmethod
    def _gauge(engine: Engine) -> Gauge:
        from glowplug.core.startup.memory_gauge import gauge_of

        return gauge_of(str(engine.runner.device))

    def _report(self, phase: str, done: int, total: int) -> None:
        self.phase = phase
        self._progress.append(Progress(0, phase, done, total))

    def submit(self, data: bytes) -> None:
        self._inbox.append(data)
        self._wake.set()

    def outputs(self, timeout: float | None) -> bytes | None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._progress:
            progress = self._progress
            self._progress = []
            return encode(progress)
        assert self._engine is not None, "outputs before start"
        try:
            return self._turn(self._engine, timeout)
        except Exception as error:
            reason = failure_of(error, self._plan, "serve")
            self._dead = f"rank 0 failed in phase serve: {reason}"
            raise EngineDead(self._dead + "\n" + traceback.format_exc(limit=-6)) from error

    def _turn(self, engine: Engine, timeout: float | None) -> bytes | None:
        if engine.idle and not self._inbox:
            self._wake.wait(timeout)
        self._wake.clear()
        frames = []
        while self._inbox:
            frames.append(self._inbox.popleft())
        found = engine.turn(frames)
        return encode(found) if found else None

    def stop(self) -> None:
        if self._engine is not None:
            self._end()
        self._dead = self._dead or "the engine was stopped"
        self._wake.set()

    def _end(self) -> None:
        assert self._engine is not None
        gauge = self._gauge(self._engine)
        engine = id(self._engine)
        self._engine.close()
        self._engine = None
        if not gauge.measures:
            return
        try:
            INLINE_ENGINES.closed(engine, gauge)
        except RuntimeError as error:  # the device has failed: its memory cannot be released
            log.warning("the device's memory was not released: %s", error)
