"""Waiting for what happens in another thread or process. The limit ends a hang; no test measures
time by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: seconds after which what is waited for counts as never coming, however busy the machine is
LIMIT = 60.0
LOOK = 0.01  #: seconds between two looks


def until(look: Callable[[], T], what: str, limit: float = LIMIT) -> T:
    """Return the first true value of ``look``.

    Args:
        look: called every few milliseconds.
        what: what is waited for, for the message.
        limit: seconds; tens of them, because it is no bound of a test.

    Raises:
        AssertionError: nothing true came within ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {limit:.0f} s"
        time.sleep(LOOK)
    return found
