"""A tier in memory of the host, for caches that are tested without an engine."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PageTier, PrefixCache, TieredCache
from glowplug.core.step.host_tier import as_pages
from glowplug.core.step.pages import SCRATCH_PAGE, Transfer
from glowplug.core.testing.harness.fake_model import FakeModel, PoisonedPages


def check_transfer(transfer: Transfer, pages: int, slots: int) -> None:
    """Check that a transfer names existing pages and slots, each once.

    Args:
        pages: number of pages of the pool, the scratch page included.
        slots: number of slots of the tier.
    """
    assert len(transfer.pages) == len(transfer.slots), "a transfer has as many slots as pages"
    for name, values, least, end in (
        ("page", transfer.pages, SCRATCH_PAGE + 1, pages),
        ("slot", transfer.slots, 0, slots),
    ):
        wrong = values[(values < least) | (values >= end)]
        assert not len(wrong), f"a transfer of {name} {wrong.tolist()}, of {least} to {end - 1}"


class SimulatedTier:
    """A cache's own ``PageTier`` over arrays with the contents of pages.

    Args:
        cache: the cache.
        contents: arrays by name, each with the contents of all pages one after another.
        pages: number of pages.
        slots: number of slots of the tier.
    """

    def __init__(
        self, cache: TieredCache, contents: dict[str, NDArray[Any]], pages: int, slots: int
    ) -> None:
        tensors = {name: torch.from_numpy(array.view(np.int64)) for name, array in contents.items()}
        self._cache = cache
        self._sizes = pages, slots
        self._tier: PageTier = cache.open_tier(as_pages(tensors, pages))

    def move(self) -> None:
        """Do the copies that the cache has decided, as the engine does before a step."""
        transfers = self._cache.take_transfers()
        for transfer in transfers:
            check_transfer(transfer, *self._sizes)
        self._tier.copy(transfers)


def simulated_tier(
    cache: PrefixCache, plan: EnginePlan, model: FakeModel, pages: PoisonedPages
) -> SimulatedTier | None:
    """Return the tier of ``cache`` over the pool of ``model``.

    If the plan has none, return None and have freed ``pages`` poisoned.
    """
    if not plan.sizes.tier_pages:
        pages.model = model
        return None
    contents = {"tokens": model.tokens, "positions": model.positions, "states": model.states}
    tiered = cast(TieredCache, cache)
    return SimulatedTier(tiered, contents, plan.sizes.num_pages, plan.sizes.tier_pages)
