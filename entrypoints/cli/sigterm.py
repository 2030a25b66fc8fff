"""SIGTERM as an exception, for programs that have to end other programs before they end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
