"""The work of a piece of Python, counted: the same number on any machine, however busy."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def lines(call: Callable[[], object]) -> int:
    """Return the number of lines of Python that ``call`` runs in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@contextmanager
def at_most(most_lines: int, most_bytes: int) -> Iterator[None]:
    """Run the block in this thread, and stop it when it exceeds a limit.

    Args:
        most_lines: Lines of Python; the functions that the block calls are counted, its own lines
            are not.
        most_bytes: Memory that the block takes from Python at any time.

    Raises:
        AssertionError: The block has exceeded a limit.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        assert count <= most_lines, f"more than {most_lines} lines of Python"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= most_bytes, f"{peak} bytes, more than {most_bytes}"
