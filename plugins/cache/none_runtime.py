"""Runtime of the prefix cache "none"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixMatch, Worker
from glowplug.plugins.cache.none import NoCacheOptions

NO_PAGES: NDArray[np.int32] = np.zeros(0, np.int32)


class NoCache:
    """The :class:`~glowplug.core.protocols.PrefixCache` that caches nothing."""

    shares = False

    def __init__(self, options: NoCacheOptions, plan: EnginePlan | None, worker: Worker) -> None:
        pass

    def match(self, tokens: NDArray[np.int32], salt: str) -> PrefixMatch:
        return PrefixMatch(0, NO_PAGES)

    def insert(
        self, tokens: NDArray[np.int32], pages: NDArray[np.int32], salt: str
    ) -> NDArray[np.int32]:
        return pages

    def lock(self, match: PrefixMatch, delta: int) -> None:
        pass

    def evict(self, pages: int) -> NDArray[np.int32]:
        return NO_PAGES

    def size(self) -> tuple[int, int]:
        return 0, 0

    def check_integrity(self) -> None:
        pass
