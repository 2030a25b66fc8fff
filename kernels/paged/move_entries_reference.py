"""The reference of ``kernels.paged.move_entries``: one entry after the other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def move_entries(pools: Iterable[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy entries of each pool [slots, *shape] from ``sources`` to ``targets``, int64 [D, S]."""
    pairs = list(zip(sources.flatten().tolist(), targets.flatten().tolist(), strict=True))
    for pool in pools:
        for source, target in pairs:
            pool[target] = pool[source]
