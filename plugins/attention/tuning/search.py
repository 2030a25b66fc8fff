"""Search for the fastest launch configuration, one constant after the other. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Tiling = TypeVar("Tiling")
#: share by which a configuration must be faster than the best one so far: less is noise
MARGIN = 0.01
ROUNDS = 3  #: most passes over all axes


def search(
    start: Tiling,
    axes: Sequence[Callable[[Tiling], Iterable[Tiling]]],
    measure: Callable[[Tiling], float | None],
    out_of_time: Callable[[], bool],
) -> tuple[Tiling, float]:
    """Return the fastest configuration found and its time.

    Along each axis all alternatives to the best configuration so far are measured, until a pass
    over all axes gains nothing. No configuration is measured twice.

    Args:
        start: the first configuration.
        axes: functions from a configuration to the alternatives in one constant.
        measure: function from a configuration to its time; None: it does not run.
        out_of_time: returns True if the search must end.

    Returns:
        The configuration and its time, which is infinite if ``start`` does not run and nothing
        else was found.
    """
    best, fastest = start, measure(start) or math.inf
    seen = {start}
    for _ in range(ROUNDS):
        before = best
        for axis in axes:
            for tiling in axis(best):
                if tiling in seen:
                    continue
                if out_of_time():
                    return best, fastest
                seen.add(tiling)
                time = measure(tiling)
                if time is not None and time < fastest * (1 - MARGIN):
                    best, fastest = tiling, time
        if best == before:
            break
    return best, fastest
