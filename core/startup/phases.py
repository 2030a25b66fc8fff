"""Start-up by phases: how long each took, and a line in the log for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]  #: phase, done, total
Note = Callable[[str], None]  #: a line for the log

SHARE = 100  #: reports a phase at most, so that many small tensors do not become many messages

logger = logging.getLogger("glowplug.engine")


class Phases:
    """Seconds by phase, in ``seconds``; phases that come twice add up."""

    def __init__(self, report: Report, note: Note = logger.info) -> None:
        self._report = report
        self.note = note
        self.seconds: dict[str, float] = {}

    @contextmanager
    def run(self, name: str) -> Iterator[list[str]]:
        """Times a phase and notes it, with the remarks that were appended meanwhile."""
        self._report(name, 0, 1)
        remarks: list[str] = []
        started = time.perf_counter()
        yield remarks
        took = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self.note("; ".join([f"{name}: {took:.1f} s", *remarks]))

    def progress(self, name: str) -> Callable[[int, int], None]:
        """Reports (done, total) of a phase, when it is worth it."""
        shown = -1

        def report(done: int, total: int) -> None:
            nonlocal shown
            share = done * SHARE // max(1, total)
            if share != shown:
                shown = share
                self._report(name, done, total)

        return report


def rate(size: int, seconds: float) -> str:
    """ "31.4 GB, 15.2 GB/s" or "34.5 MB, 0.2 GB/s": decimal, as memory and disks are sold."""
    amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    return f"{amount}, {size / 1e9 / max(seconds, 1e-9):.3g} GB/s"
