"""Conformance suite of caches with a tier (``TieredCache``), beside that of the ``cache`` slot.

Subclass it and define ``make``. The cache's own ``PageTier`` copies real bytes here. Pages have
their prefix as contents; a page that is given up is overwritten as soon as its copies are due.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PageTier, PrefixCache, PrefixMatch, TieredCache
from glowplug.core.step.host_tier import as_pages
from glowplug.core.step.pages import PageAllocator, Transfer
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.prefix_hash import EMPTY_HASH, extend
from glowplug.core.testing.harness.simulated_tier import SimulatedTier
from glowplug.core.testing.suites.cache import SIZE, CacheSuite, ints

PAGES = 33  #: pages of the pool, the scratch page included
SLOTS = 12  #: slots of the tier
LOST = -1  #: content of a page that has another owner

Ints = NDArray[np.int32]
Running = tuple[PrefixMatch, list[int], str]  #: locked match, tokens and salt of a request


def content_of(tokens: list[int], salt: str) -> list[int]:
    """Return the content of each whole page of ``tokens``: a hash of all tokens to its end."""
    start = functools.reduce(extend, salt.encode(), EMPTY_HASH)
    states = list(itertools.accumulate(tokens, extend, initial=start))
    return [state >> 1 for state in states[SIZE::SIZE]]


@dataclass(eq=False)
class TieredPool:
    """A pool whose pages have contents, around a cache; ``step`` does what precedes a step."""

    cache: TieredCache
    pages: PageAllocator = field(default_factory=lambda: PageAllocator(PAGES))

    def __post_init__(self) -> None:
        self.content = np.full(PAGES, LOST, np.int64)
        self.tier = SimulatedTier(self.cache, {"content": self.content}, PAGES, SLOTS)
        self._written: dict[int, int] = {}  # contents that the next step writes

    def take(self, count: int) -> Ints:
        """Return free pages; the cache has to give up as many as are missing."""
        self.give(self.cache.evict(max(0, count - self.pages.free)))
        found = self.pages.take(count)
        assert found is not None, "evict() gives up too few pages"
        self._written |= dict.fromkeys(found.tolist(), LOST)
        return found

    def give(self, pages: Ints) -> None:
        """Free pages."""
        self.pages.give(pages)

    def step(self) -> None:
        """Do the copies that are due, then write what the step computes."""
        self.tier.move()
        for page, content in self._written.items():
            self.content[page] = content
        self._written = {}

    def write(self, pages: Ints, contents: list[int]) -> None:
        """Have the next step write ``contents`` to pages that were taken."""
        self._written |= dict(zip(pages.tolist(), contents, strict=True))

    def keep(self, pages: Ints) -> None:
        """Have the next step leave restored pages as they are."""
        for page in pages.tolist():
            self._written.pop(page, None)

    # ---- requests --------------------------------------------------------------------------------

    def admit(self, tokens: list[int], salt: str = "") -> PrefixMatch:
        """Lock the known prefix of whole pages of ``tokens``, and bring back what is away."""
        match = self.cache.match(ints(tokens), salt)
        self.cache.lock(match, 1)
        if not match.away:
            return match
        pages = self.take(match.away // SIZE)
        self.keep(pages)
        whole = self.cache.restore(match, pages)
        assert whole.away == 0 and whole.length == match.length + match.away
        assert whole.pages.tolist() == [*match.pages.tolist(), *pages.tolist()], (
            "restore() returns other pages than those of the match, then those it received"
        )
        return whole

    def serve(self, tokens: list[int], salt: str = "") -> int:
        """Compute what is not known of ``tokens``, store it, and return the known tokens."""
        whole = tokens[: len(tokens) // SIZE * SIZE]
        match = self.admit(whole, salt)
        contents = content_of(whole, salt)
        fresh = self.take(len(contents) - len(match.pages))
        self.write(fresh, contents[len(match.pages) :])
        self.step()
        self.check(match, whole, salt)
        pages = np.concatenate([match.pages, fresh])
        self.give(self.cache.insert(ints(whole), pages, salt))
        self.cache.lock(match, -1)
        self.cache.check_integrity()
        return match.length

    def check(self, match: PrefixMatch, tokens: list[int], salt: str) -> None:
        """Check that the pages of a match hold their prefix, after a step."""
        found = self.content[match.pages].tolist()
        assert found == content_of(tokens, salt)[: len(found)], (
            "a page has the content of another prefix, or none"
        )

    def empty(self) -> None:
        """Have the cache give up all pages of the pool."""
        self.give(self.cache.evict(PAGES))
        self.step()
        assert self.cache.size() == (0, 0)


class TieredCacheSuite(CacheSuite):
    """Tests that every cache with a tier must pass, beside those of a cache."""

    def make(self, plan: EnginePlan) -> PrefixCache:
        """Return the cache under test; ``plan.sizes.tier_pages`` is the size of its tier."""
        raise NotImplementedError

    @pytest.fixture
    def cache(self) -> PrefixCache:
        return self.make(bare_plan(page_size=SIZE, num_pages=PAGES, tier_pages=SLOTS))

    @pytest.fixture
    def served(self) -> TieredPool:
        plan = bare_plan(page_size=SIZE, num_pages=PAGES, tier_pages=SLOTS)
        return TieredPool(cast(TieredCache, self.make(plan)))

    def test_an_evicted_prefix_comes_back(self, served: TieredPool) -> None:
        tokens = list(range(16))
        assert served.serve(tokens) == 0
        served.empty()
        assert served.cache.tier_size() == 4, "a page was lost although slots are free"
        match = served.cache.match(ints(tokens), "")
        assert (match.length, match.away) == (0, 16)
        assert served.serve(tokens) == 16
        assert served.cache.size() == (4, 4)

    def test_the_end_of_a_prefix_comes_back(self, served: TieredPool) -> None:
        tokens = list(range(16))
        served.serve(tokens)
        served.give(served.cache.evict(3))
        match = served.cache.match(ints(tokens), "")
        assert (match.length, match.away) == (4, 12)
        assert served.serve(tokens + [7] * 8) == 16
        assert served.serve(tokens[:8] + [8] * 8) == 8

    def test_salts_are_apart_in_the_tier(self, served: TieredPool) -> None:
        served.serve([5] * 8, "a")
        served.empty()
        assert served.cache.match(ints([5] * 8), "b").away == 0
        assert served.serve([5] * 8, "b") == 0
        assert served.serve([5] * 8, "a") == 8

    def test_a_page_is_reused_in_the_step_that_writes_it_out(self, served: TieredPool) -> None:
        """Copies follow one another in the order of the decisions."""
        first, second = [1] * 16, [2] * 16
        served.serve(first)
        served.empty()
        served.serve(second)
        served.give(served.cache.evict(PAGES))  # its pages are the next to be taken
        match = served.admit(first)
        served.step()
        served.check(match, first, "")
        served.cache.lock(match, -1)
        assert served.serve(second) == 16

    def test_a_request_that_ends_before_its_step_loses_nothing(self, served: TieredPool) -> None:
        tokens = list(range(16))
        served.serve(tokens)
        served.empty()
        for _ in range(2):
            served.cache.lock(served.admit(tokens), -1)
            served.give(served.cache.evict(PAGES))
        other = served.take(8)
        served.step()
        served.give(other)
        assert served.serve(tokens) == 16

    def test_locked_pages_stay_in_the_tier(self, served: TieredPool) -> None:
        tokens = [1] * 16
        served.serve(tokens)
        served.empty()
        match = served.cache.match(ints(tokens), "")
        served.cache.lock(match, 1)
        for first in range(2, 8):
            served.serve([first] * 16)
            served.empty()
        pages = served.take(4)
        served.keep(pages)
        whole = served.cache.restore(match, pages)
        served.step()
        served.check(whole, tokens, "")
        served.cache.lock(whole, -1)
        assert served.cache.size() == (4, 4), "restore() locks the prefix in place of the match"

    def test_a_full_tier_keeps_the_pages_used_last(self, served: TieredPool) -> None:
        for first in range(6):
            served.serve([first] * 16)
        served.empty()
        assert served.cache.tier_size() == SLOTS
        known = [served.cache.match(ints([first] * 16), "").away for first in range(6)]
        assert known == [0, 0, 0, 16, 16, 16]
        assert served.serve([5] * 16) == 16

    def test_computed_pages_replace_those_in_the_tier(self, served: TieredPool) -> None:
        tokens = list(range(16))
        served.serve(tokens)
        served.empty()
        fresh = served.take(4)
        served.write(fresh, content_of(tokens, ""))
        served.step()
        assert len(served.cache.insert(ints(tokens), fresh, "")) == 0
        match = served.cache.match(ints(tokens), "")
        assert (match.length, match.away) == (16, 0)
        served.check(match, tokens, "")

    def test_it_forgets_its_tier(self, served: TieredPool) -> None:
        served.serve([1] * 16)
        served.give(served.cache.evict(PAGES))
        served.cache.forget()
        assert served.cache.tier_size() == 0 and not served.cache.take_transfers()
        assert served.cache.match(ints([1] * 16), "").away == 0
        for _ in range(2):
            served.serve([2] * 16)
            served.empty()
        assert served.serve([2] * 16) == 16

    def test_transfers_are_taken_once(self, served: TieredPool) -> None:
        assert not served.cache.take_transfers()
        served.serve([1] * 16)
        served.give(served.cache.evict(PAGES))
        assert sum(len(one.pages) for one in served.cache.take_transfers()) == 4
        assert not served.cache.take_transfers()

    def test_pages_are_copied_whole_and_in_order(self, served: TieredPool) -> None:
        check_copies(served.cache, "cpu")

    @pytest.mark.gpu
    def test_pages_are_copied_in_the_order_of_the_stream(self, served: TieredPool) -> None:
        check_copies(served.cache, "cuda")

    @pytest.mark.parametrize("seed", range(10))
    def test_random_requests(self, served: TieredPool, seed: int) -> None:
        """Requests with common prefixes run in turn while their pages come and go."""
        rng = random.Random(seed)
        running: list[Running] = []
        known = sum(self.act_tiered(served, rng, running) for _ in range(150))
        assert known > 100, "prefixes are not found again"

    def act_tiered(self, served: TieredPool, rng: random.Random, running: list[Running]) -> int:
        """Begin, end or serve a request at random, or evict; return the known tokens."""
        pages = [rng.randrange(2) for _ in range(rng.randrange(1, 7))]
        tokens = [token for token in pages for _ in range(SIZE)]
        salt = rng.choice(["", "x"])
        action = rng.randrange(6)
        known = 0
        if action == 0 and len(running) < 2:
            running.append((served.admit(tokens, salt), tokens, salt))
        elif action == 1 and running:
            served.cache.lock(running.pop(rng.randrange(len(running)))[0], -1)
        elif action == 2:
            served.give(served.cache.evict(rng.randrange(1, 20)))
        else:
            known = served.serve(tokens, salt)
        served.step()
        for one in running:
            served.check(*one)
        served.cache.check_integrity()
        return known


def pool_of(device: str) -> dict[str, torch.Tensor]:
    """Return a pool of entries of several dtypes, whose pages differ."""
    count = torch.arange(PAGES * SIZE, device=device)
    return {
        "0.kv": torch.arange(PAGES * SIZE * 3, device=device, dtype=torch.float32).view(-1, 3),
        "1.codes": count.to(torch.int8).view(-1, 1),
        "1.scale": count.to(torch.float8_e4m3fn).view(-1, 1),
    }


#: the first copies; then a step overwrites pages 3 to 5, and the others follow
FIRST = (Transfer(ints([3, 4, 5, 9]), ints([0, 1, 2, SLOTS - 1])),)
OTHERS = (
    Transfer(ints([6, 12, 13]), ints([2, 0, 1]), back=True),
    Transfer(ints([13, 7]), ints([2, 0])),
    Transfer(ints([20, 21]), ints([2, 0]), back=True),
)
#: page -> the page whose bytes it then has
COPIED = {6: 5, 12: 3, 13: 4, 20: 4, 21: 7}


def check_copies(cache: TieredCache, device: str) -> None:
    """Check a cache's ``PageTier`` on tensors of several dtypes, on ``device``."""
    pages = as_pages(pool_of(device), PAGES)
    before = {name: tensor.clone() for name, tensor in pages.items()}
    tier: PageTier = cache.open_tier(pages)
    tier.copy(FIRST)
    for tensor in pages.values():
        tensor[3:6] = 77
    tier.copy(OTHERS)
    others = [page for page in range(PAGES) if page not in (3, 4, 5)]
    sources = [COPIED.get(page, page) for page in others]
    for name, tensor in pages.items():
        assert (tensor[3:6] == 77).all(), f"{name}: a page is overwritten"
        assert torch.equal(tensor[others], before[name][sources]), (
            f"{name}: a page has another's bytes"
        )
    tier.close()
    tier.close()
