"""The event loop of the server: uvloop's if it is installed, otherwise asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop factory for ``asyncio.Runner``; None without uvloop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, with uvloop if it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
