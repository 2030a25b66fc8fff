"""Exit codes of the command, and the way to leave it at SIGTERM.

0 success, 1 failure, 2 refused (configuration, plugins, flags, differing hosts), 3 finished, but a
part failed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

OK = 0
FAILED = 1
REFUSED = 2
PARTLY = 3
SECOND_SIGNAL = 130  #: the code with which shells report an interrupted program


@contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that context managers end the programs they started."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
