"""The allocator of the KV pool's pages, and copies of pages to a tier and back, on the host.

The cost of an operation is proportional to the number of pages taken or given back.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: page that is never allocated: padding rows and unused page-table entries point at it
SCRATCH_PAGE = 0


@dataclass(frozen=True, eq=False)
class Transfer:
    """Copies of whole pages between the KV pool and the slots of a tier.

    Attributes:
        pages: pages of the pool, int32 [n].
        slots: the slot of each page, int32 [n], from 0 to ``Sizes.tier_pages - 1``.
        back: True: slots are copied to pages; False: pages are copied to slots.
    """

    pages: NDArray[np.int32]
    slots: NDArray[np.int32]
    back: bool = False


class TransferQueue:
    """The copies that a cache has decided, in order, until the engine takes them."""

    def __init__(self) -> None:
        self._copies: list[tuple[bool, int, int]] = []

    def out(self, page: int, slot: int) -> None:
        """Copy a page to a slot."""
        self._copies.append((False, page, slot))

    def back(self, page: int, slot: int) -> None:
        """Copy a slot to a page."""
        self._copies.append((True, page, slot))

    def take(self) -> list[Transfer]:
        """Return the copies since the last call, neighbours of one direction as one transfer."""
        copies = self._copies
        if not copies:
            return []
        self._copies = []
        found = []
        for back, group in itertools.groupby(copies, key=lambda one: one[0]):
            columns = np.array(list(group), np.int32)
            found.append(Transfer(columns[:, 1], columns[:, 2], back))
        return found


class PageAllocator:
    """An allocator of pages 1 to ``num_pages - 1``, last in, first out.

    Pages taken or given back together keep their order, so sequences tend to get adjacent pages,
    which attention reads in place.

    Args:
        num_pages: pages of the pool, the scratch page included.
        check: make ``give`` verify its pages.
    """

    def __init__(self, num_pages: int, check: bool = True) -> None:
        if num_pages < 2:
            raise ValueError(
                f"a pool needs the scratch page and at least one more, got {num_pages} pages"
            )
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # the free pages are [:_top]
        self._top = num_pages - 1
        self._taken: NDArray[np.bool_] | None = np.zeros(num_pages, np.bool_) if check else None

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._top

    @property
    def total(self) -> int:
        """Number of pages for sequences: all but the scratch page."""
        return self.num_pages - 1

    def take(self, count: int) -> NDArray[np.int32] | None:
        """Take ``count`` pages, int32 [count]. Return None, and take none, if fewer are free."""
        if count > self._top:
            return None
        self._top -= count
        pages = self._stack[self._top : self._top + count][::-1].copy()
        if self._taken is not None:
            self._taken[pages] = True
        return pages

    def give(self, pages: NDArray[np.int32]) -> None:
        """Free pages. Their contents stay, since the next owner writes before it reads.

        Raises:
            ValueError: a page is not of this pool, is free already, or is given twice; only with
                ``check``.
        """
        if self._taken is not None:
            self._verify(pages, self._taken)
            self._taken[pages] = False
        count = len(pages)
        self._stack[self._top : self._top + count] = pages[::-1]
        self._top += count

    def _verify(self, pages: NDArray[np.int32], taken: NDArray[np.bool_]) -> None:
        foreign = pages[(pages <= SCRATCH_PAGE) | (pages >= self.num_pages)]
        if len(foreign):
            raise ValueError(
                f"pages {foreign.tolist()} are not of this pool (1 to {self.num_pages - 1})"
            )
        free = pages[~taken[pages]]
        if len(free):
            raise ValueError(f"pages {free.tolist()} are free already")
        if len(np.unique(pages)) != len(pages):
            raise ValueError("a page is given back twice in one call")
