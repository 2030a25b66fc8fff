"""Waiting for events in another thread or process. The limit ends a hang; no test measures time
by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: seconds after which an event counts as never coming, however busy the machine is
LIMIT = 60.0
LOOK = 0.01  #: seconds between two calls


def until(look: Callable[[], T], what: str, limit: float = LIMIT) -> T:
    """Return the first true value of ``look``.

    Args:
        look: Called every few milliseconds.
        what: The awaited event, for the message.
        limit: Seconds; tens of them, because it is no bound of a test.

    Raises:
        AssertionError: No true value came within ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {limit:.0f} s"
        time.sleep(LOOK)
    return found
