"""The transfers between a rank's KV pool and the tier of its prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence as Seq

from torch import Tensor

from glowplug.core.errors import GlowplugError, PluginLoadError
from glowplug.core.plan.budget.tier import KV_TIER
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PageStates, PageTier, SpeculativeAlgorithm, TieredCache
from glowplug.core.step.host_tier import as_pages
from glowplug.core.step.messages import Stats
from glowplug.core.step.pages import SCRATCH_PAGE, Transfer


class RankTier:
    """The tier of a rank: the cache decides on transfers, and its ``PageTier`` copies.

    The runner calls ``move`` before the first device work of each step. All copies are thus between
    the last step that wrote an evicted page and the first step that may overwrite it, and restored
    pages are complete before a step reads them, whichever step it is.

    Args:
        cache: the prefix cache.
        plan: the plan with the rank's number of pages.
        kv: the KV pool, by layer and entry.
        speculative: the algorithm, whose state of pages is copied with them.

    Raises:
        PluginLoadError: a page has other bytes than the plan has counted.
    """

    def __init__(
        self,
        cache: TieredCache,
        plan: EnginePlan,
        kv: Seq[Mapping[str, Tensor]],
        speculative: SpeculativeAlgorithm,
    ) -> None:
        sizes = plan.sizes
        pages = as_pages(_tensors(kv, speculative), sizes.num_pages)
        self.page_bytes = sum(tensor.shape[1] for tensor in pages.values())
        planned = sum(line.bytes for line in plan.budget if line.name == KV_TIER)
        if sizes.tier_pages * self.page_bytes != planned:
            raise PluginLoadError(
                f"a tier of {sizes.tier_pages} pages takes {sizes.tier_pages * self.page_bytes} "
                f"bytes, the plan has {planned}: {plan.title('speculative')} keeps state of pages "
                "that the tier does not get. Fix: return it from page_states() (PageStates), or "
                "plan without the tier"
            )
        self._cache = cache
        self._tier: PageTier = cache.open_tier(pages)
        self._title = plan.title("cache")
        self._pages = sizes.num_pages
        self._slots = sizes.tier_pages
        self.pages_out = 0
        self.pages_back = 0

    def move(self) -> None:
        """Enqueue the copies that the cache has decided since the last call."""
        transfers = self._cache.take_transfers()
        if not transfers:
            return
        for transfer in transfers:
            self._check(transfer)
            if transfer.back:
                self.pages_back += len(transfer.pages)
            else:
                self.pages_out += len(transfer.pages)
        self._tier.copy(transfers)

    def fill(self, stats: Stats) -> None:
        """Set the tier's statistics."""
        stats.tier_pages = self._cache.tier_size()
        stats.tier_pages_total = self._slots
        stats.tier_pages_out = self.pages_out
        stats.tier_pages_back = self.pages_back
        stats.tier_bytes_out = self.pages_out * self.page_bytes
        stats.tier_bytes_back = self.pages_back * self.page_bytes

    def forget(self) -> None:
        """Empty the tier, after the cache's pages in the pool were given up."""
        self._cache.forget()

    def close(self) -> None:
        """Free the tier's memory. Idempotent."""
        self._tier.close()

    def _check(self, transfer: Transfer) -> None:
        """Raise a GlowplugError if a transfer names a page or slot that does not exist."""
        pages = transfer.pages
        slots = transfer.slots
        if len(pages) != len(slots):
            wrong = f"{len(pages)} pages and {len(slots)} slots"
        elif len(pages) and not (SCRATCH_PAGE < pages.min() and pages.max() < self._pages):
            wrong = f"pages {pages.tolist()}, of 1 to {self._pages - 1}"
        elif len(slots) and not (0 <= slots.min() and slots.max() < self._slots):
            wrong = f"slots {slots.tolist()}, of 0 to {self._slots - 1}"
        else:
            return
        raise GlowplugError(f"{self._title}: take_transfers() returned a transfer of {wrong}")


def open_tier(
    cache: TieredCache,
    plan: EnginePlan,
    kv: Seq[Mapping[str, Tensor]],
    speculative: SpeculativeAlgorithm,
    measured: MutableMapping[str, int],
) -> RankTier | None:
    """Open and return the tier of the prefix cache, or None if the plan has no tier.

    Args:
        plan: the plan with the rank's number of pages.
        kv: the KV pool, by layer and entry.
        speculative: the algorithm, whose state of pages is copied with them.
        measured: bytes by budget line; the tier's are added.
    """
    if not plan.sizes.tier_pages:
        return None
    tier = RankTier(cache, plan, kv, speculative)
    measured[KV_TIER] = plan.sizes.tier_pages * tier.page_bytes
    return tier


def _tensors(kv: Seq[Mapping[str, Tensor]], speculative: SpeculativeAlgorithm) -> dict[str, Tensor]:
    """Return all tensors that have an entry for each page, by name."""
    found = {f"{layer}.{name}": one for layer, held in enumerate(kv) for name, one in held.items()}
    states = speculative.page_states() if isinstance(speculative, PageStates) else {}
    return {**found, **states}
