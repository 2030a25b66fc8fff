"""The runtime of the prefix cache "tiers"."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.api import EnginePlan
from glowplug.core.protocols import PageTier, PrefixMatch, Worker
from glowplug.core.step.host_tier import HostTier
from glowplug.core.step.pages import Transfer, TransferQueue
from glowplug_tiers.plugin import TiersOptions

Ints = NDArray[np.int32]


class Tiers:
    """Pages by the digest of all tokens up to their end, in the pool or the tier, by time of use.

    A page is used after all behind it, so the oldest one without locks is the end of a prefix.
    """

    shares = True

    def __init__(self, options: TiersOptions, plan: EnginePlan, worker: Worker) -> None:
        self._size = plan.sizes.page_size
        self._slots = plan.sizes.tier_pages
        self._queue = TransferQueue()
        self._held: OrderedDict[bytes, int] = OrderedDict()  # page of the pool
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # slot of the tier
        self._free = list(range(self._slots))
        self._locks: dict[bytes, int] = {}
        self._locked = 0  # locked pages of the pool

    def match(self, tokens: Ints, salt: str) -> PrefixMatch:
        every = self._keys(tokens, salt)
        keys = list(takewhile(lambda key: key in self._held or key in self._kept, every))
        pages = np.array([self._held[key] for key in keys if key in self._held], np.int32)
        away = len(keys) - len(pages)
        return PrefixMatch(len(pages) * self._size, pages, keys, away * self._size)

    def insert(self, tokens: Ints, pages: Ints, salt: str) -> Ints:
        keys = list(self._keys(tokens, salt))
        for key, page in zip(keys, pages.tolist(), strict=True):
            if key not in self._held:
                self._hold(key, page)
        self._use(keys)
        return pages[pages != [self._held[key] for key in keys]]

    def lock(self, match: PrefixMatch, delta: int) -> None:
        for key in match.handle or ():
            before = self._locks.pop(key, 0)
            if before + delta:
                self._locks[key] = before + delta
            if not before or not before + delta:
                self._locked += delta * (key in self._held)
        self._use(match.handle or [])

    def evict(self, pages: int) -> Ints:
        found = list(islice((key for key in self._held if key not in self._locks), pages))
        for key in found:
            oldest = next((one for one in self._kept if one not in self._locks), None)
            if not self._free and oldest is not None:
                self._free.append(self._kept.pop(oldest))
            if self._free:
                self._kept[key] = self._free.pop()
                self._queue.out(self._held[key], self._kept[key])
        return np.array([self._held.pop(key) for key in found], np.int32)

    def size(self) -> tuple[int, int]:
        return len(self._held), len(self._held) - self._locked

    def check_integrity(self) -> None:
        slots = sorted([*self._free, *self._kept.values()])
        assert slots == list(range(self._slots)), "a slot is lost or used twice"
        assert self._locked == sum(key in self._held for key in self._locks), "a lock is lost"

    def open_tier(self, pages: Mapping[str, Tensor]) -> PageTier:
        return HostTier(pages, self._slots)

    def restore(self, match: PrefixMatch, pages: Ints) -> PrefixMatch:
        for key, page in zip(match.handle[len(match.pages) :], pages.tolist(), strict=True):
            self._queue.back(page, self._kept[key])
            self._hold(key, page)
        self._use(match.handle)
        both = np.concatenate([match.pages, pages])
        return PrefixMatch(len(both) * self._size, both, match.handle)

    def take_transfers(self) -> list[Transfer]:
        return self._queue.take()

    def tier_size(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        self._kept.clear()
        self._free = list(range(self._slots))
        self._queue.take()

    def _keys(self, tokens: Ints, salt: str) -> Iterator[bytes]:
        digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
        for end in range(self._size, len(tokens) + 1, self._size):
            digest.update(tokens[end - self._size : end].tobytes())
            yield digest.digest()

    def _hold(self, key: bytes, page: int) -> None:
        self._held[key] = page
        self._locked += key in self._locks
        if key in self._kept:
            self._free.append(self._kept.pop(key))

    def _use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            order = self._held if key in self._held else self._kept
            order.move_to_end(key)
