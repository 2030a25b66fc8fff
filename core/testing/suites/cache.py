"""Conformance suite of the ``cache`` slot. Subclass it and define ``make``.

Set ``max_pages`` if your cache has a limit. A model in plain Python lists is kept beside the cache:
every prefix that the cache finds must be one that was inserted, page for page.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixCache, PrefixMatch
from glowplug.core.testing.harness.plans import bare_plan

SIZE = 4  #: tokens of a page
Ints = NDArray[np.int32]


def ints(values: list[int]) -> Ints:
    """Return an int32 array of ``values``."""
    return np.array(values, np.int32)


class Pool:
    """An allocator of page numbers that records the tokens written to each page."""

    def __init__(self) -> None:
        self.next = 1
        # page -> the salt's hash, then all tokens from the sequence's start to the page's end
        self.content: dict[int, tuple[int, ...]] = {}
        self.outside: set[int] = set()

    def fill(self, tokens: list[int], salt: str) -> Ints:
        """Return new pages filled with ``tokens``, without those of an incomplete last page."""
        pages = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            self.content[self.next] = (hash(salt), *tokens[:end])
            self.outside.add(self.next)
            pages.append(self.next)
            self.next += 1
        return ints(pages)

    @property
    def inside(self) -> int:
        """Number of pages that the cache owns."""
        return len(self.content) - len(self.outside)

    def back(self, pages: Ints) -> None:
        """Take back pages that the cache owned."""
        for page in pages.tolist():
            assert page in self.content, f"page {page} was given back but never inserted"
            assert page not in self.outside, (
                f"page {page} was given back although the cache did not own it"
            )
            self.outside.add(page)


class CacheSuite:
    """Tests that every prefix cache must pass.

    Attributes:
        max_pages: most pages that the cache may hold; None: no limit.
    """

    max_pages: int | None = None

    def make(self, plan: EnginePlan) -> PrefixCache:
        """Return the cache under test for ``plan``."""
        raise NotImplementedError

    @pytest.fixture
    def cache(self) -> PrefixCache:
        return self.make(bare_plan(page_size=SIZE))

    @pytest.fixture
    def pool(self) -> Pool:
        return Pool()

    def put(self, cache: PrefixCache, pool: Pool, tokens: list[int], salt: str = "") -> None:
        """Insert the complete pages of ``tokens`` into the cache.

        Pages that the cache already has for these tokens are inserted again; the others are new.
        """
        whole = tokens[: len(tokens) // SIZE * SIZE]
        match = cache.match(ints(whole), salt)
        cache.lock(match, 1)
        fresh = pool.fill(whole, salt)[len(match.pages) :]
        pool.outside.difference_update(fresh.tolist())
        pool.back(cache.insert(ints(whole), np.concatenate([match.pages, fresh]), salt))
        cache.lock(match, -1)
        cache.check_integrity()
        self.check_account(cache, pool)

    def check_match(self, cache: PrefixCache, pool: Pool, tokens: list[int], salt: str = "") -> int:
        """Match ``tokens``, check the pages found, and return their number of tokens."""
        match = cache.match(ints(tokens), salt)
        assert match.length == len(match.pages) * SIZE <= len(tokens)
        for i, page in enumerate(match.pages.tolist()):
            assert pool.content[page] == (hash(salt), *tokens[: (i + 1) * SIZE]), (
                "the cache returned a page of another prefix"
            )
        return match.length

    def test_empty(self, cache: PrefixCache, pool: Pool) -> None:
        assert cache.size() == (0, 0)
        assert self.check_match(cache, pool, [1, 2, 3, 4]) == 0
        assert len(cache.evict(5)) == 0
        match = cache.match(ints([1, 2, 3, 4]), "")
        cache.lock(match, 1)
        cache.lock(match, -1)
        cache.check_integrity()

    def test_whole_pages_only(self, cache: PrefixCache, pool: Pool) -> None:
        tokens = list(range(10))
        self.put(cache, pool, tokens)
        found = 8 if cache.shares else 0
        assert self.check_match(cache, pool, tokens) == found
        assert self.check_match(cache, pool, tokens[:7]) == min(found, 4)
        assert self.check_match(cache, pool, tokens[:3]) == 0

    def test_branches(self, cache: PrefixCache, pool: Pool) -> None:
        head = list(range(8))
        for tail in ([50] * 8, [60] * 8, [50, 50, 50, 50, 70, 70, 70, 70]):
            self.put(cache, pool, head + tail)
        for tail, common in (
            ([50] * 8, 8),
            ([60] * 8, 8),
            ([50, 50, 50, 50, 1, 1, 1, 1], 4),
            ([9] * 8, 0),
        ):
            found = self.check_match(cache, pool, head + tail)
            assert found == (8 + common if cache.shares else 0)

    def test_salts_are_apart(self, cache: PrefixCache, pool: Pool) -> None:
        self.put(cache, pool, list(range(8)), "a")
        assert self.check_match(cache, pool, list(range(8)), "b") == 0
        assert self.check_match(cache, pool, list(range(8)), "") == 0
        self.put(cache, pool, list(range(8)), "b")
        self.check_match(cache, pool, list(range(8)), "b")

    def test_duplicates_are_given_back(self, cache: PrefixCache, pool: Pool) -> None:
        tokens = list(range(8))
        first = pool.fill(tokens, "")
        second = pool.fill(tokens, "")
        pool.outside.clear()
        pool.back(cache.insert(ints(tokens), first, ""))
        returned = cache.insert(ints(tokens), second, "")
        pool.back(returned)
        assert sorted(returned.tolist()) == second.tolist()
        cache.check_integrity()

    def test_locked_pages_stay(self, cache: PrefixCache, pool: Pool) -> None:
        self.put(cache, pool, list(range(12)))
        self.put(cache, pool, list(range(4)) + [9] * 8)
        match = cache.match(ints(list(range(8))), "")
        cache.lock(match, 1)
        held, evictable = cache.size()
        assert held - evictable == len(match.pages)
        pool.back(cache.evict(100))
        cache.check_integrity()
        self.check_account(cache, pool)
        assert self.check_match(cache, pool, list(range(12))) == match.length
        cache.lock(match, -1)
        pool.back(cache.evict(100))
        assert cache.size() == (0, 0)

    def test_eviction_takes_the_least_recently_used_end(
        self, cache: PrefixCache, pool: Pool
    ) -> None:
        if not cache.shares:
            pytest.skip("holds nothing")
        self.put(cache, pool, [1] * 12)
        self.put(cache, pool, [2] * 12)
        match = cache.match(ints([1] * 12), "")
        cache.lock(match, 1)
        cache.lock(match, -1)
        pool.back(cache.evict(1))
        self.check_account(cache, pool)
        assert self.check_match(cache, pool, [1] * 12) == 12
        assert self.check_match(cache, pool, [2] * 12) == 8, (
            "the end of a prefix must be evicted before its beginning"
        )

    @pytest.mark.parametrize("wanted", range(1, 8))
    def test_eviction_gives_up_as_much_as_is_asked_for(
        self, cache: PrefixCache, pool: Pool, wanted: int
    ) -> None:
        """Fewer pages come back only if fewer may be evicted."""
        for first in range(3):
            self.put(cache, pool, [first] * 8)
        evictable = cache.size()[1]
        given = cache.evict(wanted)
        pool.back(given)
        assert len(given) >= min(wanted, evictable)
        self.check_account(cache, pool)

    def test_two_locks_hold_until_both_are_gone(self, cache: PrefixCache, pool: Pool) -> None:
        tokens = list(range(8))
        self.put(cache, pool, tokens)
        matches = [cache.match(ints(tokens), "") for _ in range(2)]
        for match in matches:
            cache.lock(match, 1)
        cache.lock(matches[0], -1)
        pool.back(cache.evict(100))
        assert self.check_match(cache, pool, tokens) == matches[1].length
        cache.lock(matches[1], -1)
        self.check_empties(cache, pool)

    @pytest.mark.parametrize("seed", range(20))
    def test_random_use(self, cache: PrefixCache, pool: Pool, seed: int) -> None:
        rng = random.Random(seed)
        locked: list[tuple[PrefixMatch, list[int], str]] = []
        for _ in range(300):
            self.act(cache, pool, rng, locked)
            cache.check_integrity()
            self.check_locked(cache, pool, locked)
            self.check_account(cache, pool)
        for match, _, _ in locked:
            cache.lock(match, -1)
        self.check_empties(cache, pool)

    def act(
        self,
        cache: PrefixCache,
        pool: Pool,
        rng: random.Random,
        locked: list[tuple[PrefixMatch, list[int], str]],
    ) -> None:
        """Insert, lock, unlock or evict at random; ``locked``, the locked prefixes, is updated."""
        tokens = [rng.randrange(2) for _ in range(rng.randrange(0, 40))]
        salt = rng.choice(["", "x"])
        action = rng.randrange(5)
        if action <= 1:
            self.put(cache, pool, tokens, salt)
        elif action == 2:
            match = cache.match(ints(tokens), salt)
            cache.lock(match, 1)
            locked.append((match, tokens, salt))
        elif action == 3 and locked:
            cache.lock(locked.pop(rng.randrange(len(locked)))[0], -1)
        else:
            pool.back(cache.evict(rng.randrange(1, 12)))

    def check_locked(
        self, cache: PrefixCache, pool: Pool, locked: list[tuple[PrefixMatch, list[int], str]]
    ) -> None:
        """Check that every locked prefix is still in the cache."""
        for match, tokens, salt in locked:
            found = self.check_match(cache, pool, tokens, salt)
            assert found >= match.length, "a locked prefix was evicted"

    def check_empties(self, cache: PrefixCache, pool: Pool) -> None:
        """Check that a cache without locks gives back every page."""
        pool.back(cache.evict(10_000))
        assert cache.size() == (0, 0)
        self.check_account(cache, pool)

    def check_account(self, cache: PrefixCache, pool: Pool) -> None:
        """Check that the cache's page counts agree with the pool's and keep the limit.

        Each page that was inserted is in the cache or was given back.
        """
        held, evictable = cache.size()
        assert 0 <= evictable <= held
        assert held == pool.inside, f"size() counts {held} pages, {pool.inside} were not given back"
        assert self.max_pages is None or held <= self.max_pages
