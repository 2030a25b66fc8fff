"""Measured speeds of an engine with several sizes of a parallelism strategy, and the fastest one.

Size 1 stands for the layout without the strategy. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

#: number of concurrent requests -> size of the strategy -> output tokens per second
LayoutSpeeds = Mapping[int, Mapping[int, float]]


def compared(speeds: LayoutSpeeds, size: int) -> list[int]:
    """Return the numbers of requests, ascending, that were measured with ``size`` and size 1."""
    return sorted(requests for requests, row in speeds.items() if {1, size} <= row.keys())


def faster_from(speeds: LayoutSpeeds, size: int) -> int | None:
    """Return the switch point: the fewest requests from which ``size`` is faster than size 1.

    It is faster at this number of requests and at every larger one that was compared.

    Returns:
        The number of requests; None if ``size`` is not faster at the largest one.
    """
    found = None
    for requests in reversed(compared(speeds, size)):
        if speeds[requests][size] <= speeds[requests][1]:
            break
        found = requests
    return found


def sizes_beside(speeds: LayoutSpeeds) -> list[int]:
    """Return the measured sizes other than 1, ascending."""
    return sorted({size for row in speeds.values() for size in row} - {1})


def switch_points(speeds: LayoutSpeeds) -> dict[int, int]:
    """Return the switch point of each size that has one; see ``faster_from``."""
    found = {size: faster_from(speeds, size) for size in sizes_beside(speeds)}
    return {size: point for size, point in found.items() if point is not None}


def fastest_size(speeds: LayoutSpeeds, requests: int) -> int:
    """Return the size to run ``requests`` concurrent requests with.

    Of the sizes whose switch point is not above ``requests``, it is the one with the largest gain
    over size 1 at the most requests, up to ``requests``, that were compared with it. It is 1 if
    there is no such size.
    """
    fitting = [size for size, point in switch_points(speeds).items() if point <= requests]
    return max(fitting, key=lambda size: _gain(speeds, size, requests), default=1)


def _gain(speeds: LayoutSpeeds, size: int, requests: int) -> float:
    """Return the speed of ``size`` over that of size 1 at the most compared requests allowed."""
    at = max(found for found in compared(speeds, size) if found <= requests)
    return speeds[at][size] / speeds[at][1]
