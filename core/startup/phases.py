"""Start-up phases: their progress reports, durations and log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from glowplug.core.startup.compile_time import CompileTime

Report = Callable[[str, int, int], None]  #: callback for progress: phase, done, total
Note = Callable[[str], None]  #: callback for one log line

#: most progress reports of a phase, so that many small tensors do not become many messages
MAX_REPORTS = 100

logger = logging.getLogger("glowplug.engine")


class Phases:
    """The durations of start-up phases.

    Attributes:
        note: callback for log lines.
        seconds: seconds by phase; a phase that runs twice adds up.
    """

    def __init__(self, report: Report, note: Note = logger.info, device: str = "cpu") -> None:
        self._report = report
        self._running = ""  # the phase that runs; "" between two phases
        self._compilers = CompileTime(device)
        self.note = note
        self.seconds: dict[str, float] = {}

    @contextmanager
    def run(self, name: str) -> Iterator[list[str]]:
        """Time a phase and log it, together with the remarks appended to the yielded list."""
        self._running = name
        self._report(name, 0, 1)
        remarks: list[str] = []
        started = time.perf_counter()
        yield remarks
        took = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self._running = ""
        self.note("; ".join([f"{name}: {took:.1f} s", *remarks]))

    @contextmanager
    def building(self) -> Iterator[None]:
        """Report the phase ``build`` while a component is built, also during another phase."""
        self._report("build", 0, 1)
        yield
        if self._running:
            self._report(self._running, 0, 1)

    def end(self) -> None:
        """End the start: Triton kernels compiled from now on are logged."""
        self._compilers.end_start()

    def times(self) -> dict[str, Any]:
        """Return the seconds of each phase, and the seconds spent in compilers until now."""
        return {"startup_seconds": self.seconds, "compile_seconds": self._compilers.seconds}

    def progress(self, name: str) -> Callable[[int, int], None]:
        """Return a callback for (done, total) that reports at most once per percent."""
        shown = -1

        def report(done: int, total: int) -> None:
            nonlocal shown
            share = done * MAX_REPORTS // max(1, total)
            if share != shown:
                shown = share
                self._report(name, done, total)

        return report


def rate(size: int, seconds: float) -> str:
    """Return a number of bytes and its rate as text: "31.4 GB, 15.2 GB/s" or "34.5 MB, 0.2 GB/s".

    Units are decimal.
    """
    amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    return f"{amount}, {size / 1e9 / max(seconds, 1e-9):.3g} GB/s"
