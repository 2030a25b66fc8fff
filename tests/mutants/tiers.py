"""Faults planted in a cache with a tier: the sample distribution glowplug-tiers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.step.pages import Transfer
from glowplug.core.testing.suites.tiers import TieredCacheSuite
from tests.mutants.framework import Mutant, Planter

SAMPLE = Path(__file__).parents[1] / "thirdparty/glowplug-tiers/src"


class TieredCaches(TieredCacheSuite):
    def make(self, plan: EnginePlan) -> Any:
        if str(SAMPLE) not in sys.path:
            sys.path.append(str(SAMPLE))
        from glowplug_tiers.plugin import TiersOptions
        from glowplug_tiers.runtime import Tiers

        return Tiers(TiersOptions(), plan, Worker())


cache = Planter("cache", TieredCaches)
COMES_BACK = "test_an_evicted_prefix_comes_back"
LOCKED = "test_locked_pages_stay_in_the_tier"
COPIES = "test_pages_are_copied_whole_and_in_order"


def _changed(back: bool, change: Any) -> Any:
    """Return a ``take_transfers`` that changes the transfers of one direction."""

    def take(correct: Any) -> Any:
        return [change(one) if one.back is back else one for one in correct()]

    return take


def _shorter(transfer: Transfer) -> Transfer:
    return replace(transfer, pages=transfer.pages[:-1], slots=transfer.slots[:-1])


def _mixed(transfer: Transfer) -> Transfer:
    return replace(transfer, slots=transfer.slots[::-1])


def _twice() -> Any:
    taken: list[Any] = []

    def take(correct: Any) -> Any:
        taken[:] = correct() or taken
        return list(taken)

    return take


def _only_in_the_pool(lock: Any, match: Any, delta: int) -> None:
    lock(replace(match, handle=match.handle[: len(match.pages)]), delta)


def _unlocked(made: Any) -> None:
    restore = made.restore

    def restored(match: Any, pages: Any) -> Any:
        found = restore(match, pages)
        made.lock(found, -1)
        return found

    made.restore = restored


def _in_the_pool(match: Any, tokens: Any, salt: str) -> Any:
    found = match(tokens, salt)
    return replace(found, length=found.length + found.away, away=0)


def _pages(change: Any) -> Any:
    """Return an ``open_tier`` that sees other tensors."""
    return lambda open_tier, pages: open_tier(change(pages))


def _reordered(open_tier: Any, pages: Any) -> Any:
    tier = open_tier(pages)
    copy = tier.copy
    tier.copy = lambda transfers: copy(transfers[::-1])
    return tier


MUTANTS: list[Mutant] = [
    cache.swap(
        "a page is lost on its way out",
        COMES_BACK,
        "take_transfers",
        _changed(False, _shorter),
    ),
    cache.swap(
        "a page is lost on its way back", COMES_BACK, "take_transfers", _changed(True, _shorter)
    ),
    cache.swap(
        "another page is brought back", COMES_BACK, "take_transfers", _changed(True, _mixed)
    ),
    cache.swap("pages away count as held", COMES_BACK, "match", _in_the_pool),
    cache.swap(
        "pages come back before others leave",
        "test_a_page_is_reused_in_the_step_that_writes_it_out",
        "take_transfers",
        lambda take: sorted(take(), key=lambda one: not one.back),
    ),
    cache.swap(
        "transfers are done twice", "test_transfers_are_taken_once", "take_transfers", _twice()
    ),
    cache.swap("locked slots are used again", LOCKED, "lock", _only_in_the_pool),
    cache.change("restored pages are not locked", LOCKED, _unlocked),
    cache.swap(
        "a flush leaves the tier", "test_it_forgets_its_tier", "forget", lambda forget: None
    ),
    cache.swap(
        "salts share the tier",
        "test_salts_are_apart_in_the_tier",
        "match",
        lambda match, tokens, salt: match(tokens, "a"),
    ),
    cache.swap(
        "one tensor is copied",
        COPIES,
        "open_tier",
        _pages(lambda pages: dict(list(pages.items())[:1])),
    ),
    cache.swap(
        "half a page is copied",
        COPIES,
        "open_tier",
        _pages(lambda pages: {name: one[:, : one.shape[1] // 2] for name, one in pages.items()}),
    ),
    cache.swap("copies are done last first", COPIES, "open_tier", _reordered),
]
