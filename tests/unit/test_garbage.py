"""Objects of engines in a user's process are left out of garbage collections while one is open."""

from __future__ import annotations

import gc
import weakref

from glowplug.core.startup.garbage import InlineEngines
from glowplug.core.startup.memory_gauge import HostGauge
from tests.support import uninterpreted


class Part:
    """A part of an engine that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_objects_are_frozen_until_the_last_engine_closes() -> None:
    """Objects of other tests are left alone: to collect them all takes seconds each time."""
    uninterpreted.printed("-m", "tests.unit.test_garbage")


def open_and_close() -> None:
    """Open two engines, and close them in turn."""
    engines = InlineEngines()
    first, second = Part(), Part()
    gone = weakref.ref(first)
    ids = id(first), id(second)
    engines.opened(first)
    engines.opened(second)
    assert gc.get_freeze_count() > 0
    del first
    gc.collect()
    assert gone() is not None, "frozen objects are not collected"
    engines.closed(ids[0], HostGauge())
    assert gone() is None and gc.get_freeze_count() > 0
    engines.closed(ids[1], HostGauge())
    assert gc.get_freeze_count() == 0


if __name__ == "__main__":
    open_and_close()
