"""Objects of engines in a user's process are left out of garbage collections while one is open."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from glowplug.core.startup.garbage import InlineEngines, settle_memory
from glowplug.core.startup.memory_gauge import HostGauge


class Part:
    """A part of an engine that refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collected() -> Iterator[None]:
    """Leave the objects of the test process frozen, as they were."""
    gc.unfreeze()
    yield
    settle_memory()


def test_objects_are_frozen_until_the_last_engine_closes(collected: None) -> None:
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
