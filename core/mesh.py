"""Arithmetic of the device mesh: where a rank stands on each named axis. No torch.

Ranks are numbered with "tp" fastest, then "pp". Every other axis ("dp", "ep") lies over the tp ranks: an axis of size s
cuts them into s groups of neighbours, so that with ``{"tp": 8, "dp": 4}`` ranks 0 and 1 are dp group 0.
"""
from __future__ import annotations

from collections.abc import Mapping


def coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Axis -> index of ``rank``. ValueError when an axis does not divide the tp ranks."""
    tp = mesh.get("tp", 1)
    within = rank % tp
    found = {"tp": within, "pp": rank // tp} if mesh else {}
    for axis, size in mesh.items():
        if axis in ("tp", "pp", "world"):
            continue
        if tp % size:
            raise ValueError(f"axis {axis} of {size} does not divide the {tp} tp ranks")
        found[axis] = within // (tp // size)
    return {axis: index for axis, index in found.items() if axis in mesh}

