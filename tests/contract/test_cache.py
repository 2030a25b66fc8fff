"""The built-in prefix caches pass the conformance suite."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixCache, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.cache import SIZE, CacheSuite, Pool, ints
from glowplug.plugins.cache.none import NoCacheOptions
from glowplug.plugins.cache.none_runtime import NoCache
from glowplug.plugins.cache.radix import RadixOptions
from glowplug.plugins.cache.radix_runtime import RadixCache


class TestNone(CacheSuite):
    max_pages = 0

    def make(self, plan: EnginePlan) -> PrefixCache:
        return NoCache(NoCacheOptions(), plan, Worker())


class TestRadix(CacheSuite):
    def make(self, plan: EnginePlan) -> RadixCache:
        return RadixCache(RadixOptions(), plan, Worker())

    def test_nothing_is_left_of_an_empty_salt(self, cache: RadixCache, pool: Pool) -> None:
        for i in range(50):
            self.put(cache, pool, list(range(8)), f"tenant {i}")
        cache.evict(100)
        assert cache._roots == {}

    def test_the_eviction_queue_stays_small(self, cache: RadixCache, pool: Pool) -> None:
        self.put(cache, pool, list(range(8)))
        match = cache.match(ints(list(range(8))), "")
        for _ in range(5000):
            cache.lock(match, 1)
            cache.lock(match, -1)
        assert len(cache._leaves) < 200

    @pytest.mark.parametrize(
        "break_it, message",
        [
            (lambda cache: setattr(cache, "_held", cache._held + 1), "pages counted"),
            (lambda cache: setattr(cache, "_locked", 1), "locked pages"),
            (lambda cache: cache._leaves.clear(), "not queued for eviction"),
            (
                lambda cache: next(cache._below(cache._roots[""])).pages.__setitem__(0, 2),
                "held twice",
            ),
            (
                lambda cache: next(cache._below(cache._roots[""])).tokens.__setitem__(0, 99),
                "link is broken",
            ),
        ],
    )
    def test_integrity_sees_damage(self, cache: RadixCache, break_it: object, message: str) -> None:
        cache.insert(np.arange(2 * SIZE, dtype=np.int32), ints([1, 2]), "")
        assert callable(break_it)
        break_it(cache)
        with pytest.raises(AssertionError, match=message):
            cache.check_integrity()


class TestRadixOfNinePages(CacheSuite):
    max_pages = 9

    def make(self, plan: EnginePlan) -> RadixCache:
        return RadixCache(RadixOptions(max_pages=9), plan, Worker())


def test_a_full_cache_keeps_the_newest() -> None:
    cache, pool = RadixCache(RadixOptions(max_pages=4), bare_plan(page_size=SIZE), Worker()), Pool()
    suite = CacheSuite()
    for value in range(3):
        suite.put(cache, pool, [value] * 12)
    assert suite.check_match(cache, pool, [2] * 12) == 12
    assert suite.check_match(cache, pool, [1] * 12) == 4
    assert suite.check_match(cache, pool, [0] * 12) == 0
