"""Pass five: sizes and the byte budget of each rank, with the rest for the KV cache. No torch.

Sizing has three steps: counts, the fixed lines of the budget, and the pages of the KV cache. Each
returns its decisions, or a refusal.

These estimates decide whether a plan can run and how many pages it gets. On a device, each rank
measures its memory before the port opens, and the KV cache gets the memory that is really left
(``core/startup/page_fit.py``).
"""

from __future__ import annotations

from glowplug.core.errors import Refusal
from glowplug.core.plan.budget.captured import short_steps
from glowplug.core.plan.budget.counts import Counts, decide_counts
from glowplug.core.plan.budget.memory_share import Budget, decide_budget
from glowplug.core.plan.budget.pages import Pages, decide_pages
from glowplug.core.plan.budget.tier import decide_tier, with_tier
from glowplug.core.plan.plan import BudgetLine, Decision, Sizes
from glowplug.core.plan.proposal import Proposal


def size(proposal: Proposal) -> tuple[Sizes, tuple[BudgetLine, ...]] | None:
    """Return the engine's sizes and the byte budget; None after adding a refusal to the proposal.

    Model, attention, quantization and speculative algorithm must have been chosen.
    """
    counts = decide_counts(proposal)
    for one in proposal.models:
        one.values.page_size = counts.page_size
        one.values.expandable_segments = counts.expandable_segments
    budget = _budget(proposal, counts)
    if isinstance(budget, Refusal):
        proposal.refusals.append(budget)
        return None
    pages = decide_pages(proposal, counts, budget)
    if isinstance(pages, Refusal):
        proposal.refusals.append(pages)
        return None
    sizes = _sizes(proposal, counts, pages, budget)
    proposal.values.positions = sizes.positions
    proposal.values.short_rows = sizes.short_rows
    proposal.decisions += [
        *counts.decisions,
        *budget.decisions,
        *pages.decisions,
        *_draft_remarks(proposal),
    ]
    return sizes, (*budget.lines, *pages.lines)


def _budget(proposal: Proposal, counts: Counts) -> Budget | Refusal:
    """Return the fixed lines of the budget, with the tier of the prefix cache, or a refusal."""
    budget = decide_budget(proposal, counts)
    if isinstance(budget, Refusal):
        return budget
    tier = decide_tier(proposal, counts)
    if tier is None or isinstance(tier, Refusal):
        return tier or budget
    return with_tier(proposal, counts, tier, budget)


def _sizes(proposal: Proposal, counts: Counts, pages: Pages, budget: Budget) -> Sizes:
    """Return the engine's sizes, computed from the counts of a step, the pages and the budget."""
    keys, short = short_steps(proposal, counts.rows, pages.context)
    return Sizes(
        context_length=pages.context,
        max_running=counts.rows,
        max_queued=counts.queued,
        max_step_tokens=counts.step_tokens,
        chunk_size=counts.chunk,
        page_size=counts.page_size,
        groups=counts.groups,
        num_pages=pages.number,
        kv_bytes=pages.kv_bytes,
        width=proposal.values.width,
        draft_shape=proposal.values.draft_shape,
        draft_shapes=proposal.values.draft_shapes,
        draft_layers=proposal.values.draft_layers,
        draft_extends=proposal.values.draft_extends,
        lookahead=proposal.values.lookahead,
        least_pages=pages.least,
        most_pages=pages.most,
        pass_tokens=counts.captured.pass_tokens,
        extend_tokens=counts.captured.extend_tokens,
        tier_pages=budget.tier_pages,
        peak_tokens=_peak_tokens(proposal),
        short_keys=keys,
        short_rows=short,
    )


def _peak_tokens(proposal: Proposal) -> tuple[int, ...]:
    """Return ``Sizes.peak_tokens``, as numbers of tokens in one dp group.

    Steps with these token counts may hold more memory than larger steps. The quantization scheme
    states the counts for all groups, so they are divided by the number of groups.
    """
    scheme = proposal.quantization
    if proposal.values.device != "cuda" or scheme is None or scheme.offers.peak_tokens is None:
        return ()
    groups = proposal.values.mesh.get("dp", 1)
    return tuple(tokens // groups for tokens in scheme.offers.peak_tokens(scheme.options))


def _draft_remarks(proposal: Proposal) -> list[Decision]:
    """Return a remark for the plan if only the first of several next-token layers are used."""
    layers = (proposal.facts.draft or proposal.facts.model).nextn_layers
    used = proposal.values.draft_layers
    if not 0 < used < layers:
        return []
    first = "the first of" if used == 1 else f"the first {used} of"
    why = f"{first} {layers} next-token layers {'drafts' if used == 1 else 'draft'} every token"
    return [Decision("speculative.layers", used, "size", why, notable=True)]
