"""Control of Python's garbage collector in processes that must answer within milliseconds."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glowplug.core.startup.memory_gauge import Gauge


def settle_memory() -> None:
    """Exclude all objects loaded so far from later garbage collections.

    NOTE: a full collection over a loaded engine's objects takes 0.1 to 0.5 s, in which no step
    starts.
    """
    gc.collect()
    gc.freeze()


class InlineEngines:
    """The open engines of a process that also runs its user's code, on a host with a device.

    Their objects are excluded from garbage collections until the last of them is closed: a full
    collection took 0.15 to 0.2 s with five engines of the embedded model, in which no step started.
    """

    def __init__(self) -> None:
        self._open = set[int]()  # ids of the engines

    def opened(self, engine: object) -> None:
        """Exclude the objects loaded so far, those of a new ``engine`` among them."""
        self._open.add(id(engine))
        settle_memory()

    def closed(self, engine: int, gauge: Gauge) -> None:
        """Release the memory of an engine that was closed, so that other engines can use it.

        ``engine``: its id.

        NOTE: the parts of an engine form reference cycles, and allocating the next engine's first
        tensors does not trigger a collection. When two engines of V3's shape ran one after the
        other in a process, the second ran out of memory.
        """
        self._open.discard(engine)
        gc.unfreeze()
        gc.collect()
        if self._open:
            gc.freeze()
        gauge.settle()


INLINE_ENGINES = InlineEngines()
