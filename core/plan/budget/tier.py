"""The tier of a prefix cache: its pages, and the memory that it takes on a host. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glowplug.core.errors import Refusal
from glowplug.core.plan.budget.counts import Counts
from glowplug.core.plan.budget.memory_share import CPU_SHARE, Budget
from glowplug.core.plan.budget.pages import bytes_of_page, least_pool
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.plan import BudgetLine
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import HOST_MEMORY, CacheOffers
from glowplug.core.plugin.options import CacheOptions

KV_TIER = "kv tier"  #: name of the budget line of a tier


@dataclass(frozen=True)
class TierSize:
    """The size of a tier on each rank.

    Attributes:
        field: the option that sets it.
        pages: number of pages.
        page_bytes: bytes of a page.
        place: where the bytes are.
        how: description of the pages.
    """

    field: str
    pages: int
    page_bytes: int
    place: str
    how: str

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes


def tier_bytes(offers: CacheOffers, options: CacheOptions) -> int:
    """Return the bytes of a cache's tier on each rank, by its options; 0 if it has none."""
    return int(getattr(options, offers.tier.option)) if offers.tier is not None else 0


def decide_tier(proposal: Proposal, counts: Counts) -> TierSize | Refusal | None:
    """Return the size of the cache's tier, None without a tier, or a refusal if no page fits."""
    cache = proposal.cache
    if cache is None or cache.offers.tier is None:
        return None
    given = tier_bytes(cache.offers, cache.options)
    if given == 0:
        return None
    field = f"cache.{cache.offers.tier.option}"
    page = bytes_of_page(proposal, counts.page_size)
    if given < page:
        return Refusal(
            "size",
            field,
            f"{given} bytes hold no page of {counts.page_size} tokens, which has {page} bytes",
            f"{field} = {page} or more, or {field} = 0",
        )
    how = f"{given // page} evicted pages of {counts.page_size} tokens, {page} bytes each"
    return TierSize(field, given // page, page, cache.offers.tier.place, how)


def with_tier(
    proposal: Proposal, counts: Counts, tier: TierSize, budget: Budget
) -> Budget | Refusal:
    """Return the budget with the tier's line, or a refusal if the host has too little memory.

    On a CPU, the tier and everything else share the rank's memory. Beside GPUs, the tiers of a
    host's ranks may take ``CPU_SHARE`` of its memory.
    """
    place = tier.place
    if place == HOST_MEMORY and proposal.values.device == "cpu":
        place = ""
        room = budget.left - least_pool(proposal, counts.page_size, budget)
        refusal = _refusal(tier, room, budget.share.shown)
    elif place == HOST_MEMORY:
        per_host = -(-proposal.values.ranks // proposal.values.hosts)
        memory = proposal.facts.hardware.cpu_memory
        room = int(memory * CPU_SHARE) // per_host
        shared = f"{CPU_SHARE:.0%} of the host's {human(memory)}"
        refusal = _refusal(tier, room, f"{shared}, for {per_host} ranks" * (per_host > 1) or shared)
    else:
        refusal = None
    line = BudgetLine(KV_TIER, tier.bytes, tier.how, place=place)
    return refusal or replace(budget, lines=(*budget.lines, line), tier_pages=tier.pages)


def _refusal(tier: TierSize, room: int, shown: str) -> Refusal | None:
    """Return the refusal of a tier that is larger than ``room`` bytes; None if it fits.

    ``shown``: the memory of which ``room`` is left, as text.
    """
    if tier.bytes <= room:
        return None
    fit = max(0, room) // tier.page_bytes * tier.page_bytes
    return Refusal(
        "size",
        tier.field,
        f"the prefix cache's tier needs {human(tier.bytes)} of host memory on each rank, and "
        f"{human(max(0, room))} of {shown} are left",
        f"{tier.field} = {fit}" + (" (no tier)" if not fit else " or less"),
    )
