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


def give_memory_back(gauge: Gauge) -> None:
    """Collect garbage and release the device's unused memory, so that other engines can use it.

    Nothing happens on a host without a device.

    NOTE: the parts of an engine form reference cycles, and allocating the next engine's first
    tensors does not trigger a collection. When two engines of V3's shape ran one after the other in
    a process, the second ran out of memory.
    """
    if gauge.measures:
        gc.collect()
        gauge.settle()
