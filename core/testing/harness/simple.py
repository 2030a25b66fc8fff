"""The simplest cache and policy, to test a scheduler without any plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from glowplug.core.protocols import PrefixMatch
from glowplug.core.step.request import Sequence


class KeepsNothing:
    """A prefix cache that never holds a page."""

    shares = False

    def match(self, tokens: NDArray[np.int32], salt: str) -> PrefixMatch:
        return PrefixMatch(0, np.zeros(0, np.int32))

    def insert(
        self, tokens: NDArray[np.int32], pages: NDArray[np.int32], salt: str
    ) -> NDArray[np.int32]:
        return pages

    def lock(self, match: PrefixMatch, delta: int) -> None:
        pass

    def evict(self, pages: int) -> NDArray[np.int32]:
        return np.zeros(0, np.int32)

    def size(self) -> tuple[int, int]:
        return 0, 0

    def check_integrity(self) -> None:
        pass


class FirstCome:
    """A policy that keeps the queue's order and preempts the newest sequence."""

    def order(self, waiting: Seq[Sequence], cached: Mapping[int, int]) -> list[Sequence]:
        return list(waiting)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return running[-1]
