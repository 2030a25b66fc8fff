"""Python's garbage collector in processes that answer within milliseconds."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glowplug.core.startup.memory_gauge import Gauge


def settle_memory() -> None:
    """What has been loaded stays: collections from now on look at what was made since.

    NOTE: a full collection over a loaded engine's objects takes 0.1 to 0.5 s, in which no step
    starts.
    """
    gc.collect()
    gc.freeze()


def give_memory_back(gauge: Gauge) -> None:
    """What nobody refers to any more goes from the device, too, so that others can have it; nothing
    on a host.

    NOTE: an engine's parts refer to one another, and the next engine's first tensors ask no
    collector: of two engines of V3's shape, one after the other in a process, the second ran out of
    memory.
    """
    if gauge.measures:
        gc.collect()
        gauge.settle()
