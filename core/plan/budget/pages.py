"""The third step of sizing: the pages of the KV cache and the longest sequence. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import DTYPE_BYTES, KVLayout
from glowplug.core.plan.budget.counts import Counts
from glowplug.core.plan.budget.memory_share import Budget
from glowplug.core.plan.budget.units import GIB, human
from glowplug.core.plan.kv_entries import kv_layers, planned_entries
from glowplug.core.plan.plan import BudgetLine, Decision
from glowplug.core.plan.proposal import Proposal

CPU_KV_CAP = 4 * GIB  #: most bytes of the KV cache on a CPU by default
DRAFT_CACHE = "draft kv cache"  #: name of the budget line for a draft's KV pool of its own
#: names of the budget lines that grow with the pages of the pool, beside the pool itself
PAGE_LINES = frozenset({"page states", DRAFT_CACHE})
KV_SPARE = 4  #: largest default pool, as a multiple of the pages that running sequences can use


@dataclass(frozen=True)
class Pages:
    """The pages of the KV pool, and the longest sequence.

    Attributes:
        number: pages of the pool, including the scratch page 0.
        least: fewest pages with which the engine serves after memory was measured.
        most: most pages if measured memory allows more than planned.
        context: longest sequence, including prompt and output.
        kv_bytes: bytes of the pool.
        lines: the lines of the budget.
        decisions: the decisions for the pool's tokens and the longest sequence.
    """

    number: int
    least: int
    most: int
    context: int
    kv_bytes: int
    lines: tuple[BudgetLine, ...]
    decisions: tuple[Decision, ...]


def decide_pages(proposal: Proposal, counts: Counts, budget: Budget) -> Pages | Refusal:
    """Return the pages of the KV pool that fit into the memory that is left, or a refusal."""
    size = counts.page_size
    of_page = _page_bytes(proposal, size)
    tokens = _kv_tokens(proposal, counts, budget, of_page.all)
    if isinstance(tokens, Refusal):
        return tokens
    number = tokens.value // size + 1
    context = _context(proposal, number, size, of_page.cache // size, budget.share.shown)
    if isinstance(context, Refusal):
        return context
    least, most = _bounds(proposal, number, counts, context.value)
    return Pages(
        number=number,
        least=least,
        most=most,
        context=context.value,
        kv_bytes=number * of_page.cache,
        lines=of_page.lines(number, size),
        decisions=(tokens, context),
    )


def _bounds(proposal: Proposal, number: int, counts: Counts, context: int) -> tuple[int, int]:
    """Return the fewest and most pages that a rank may have after measuring its memory.

    Args:
        number: planned pages of the pool.
        context: longest sequence in tokens.
    """
    memory = proposal.config.memory
    sizes = (memory.kv_tokens, memory.kv_bytes, memory.static_fraction)
    given = any(size is not None for size in sizes)
    if proposal.values.device == "cpu" or given:
        return number, number
    each = _sequence_pages(proposal, context, counts.page_size)
    return min(number, each + 1), max(number, KV_SPARE * counts.rows * each + 1)


# ---- bytes ---------------------------------------------------------------------------------------


class _PageBytes(NamedTuple):
    """The bytes of one page on a rank.

    Attributes:
        cache: of the KV pool.
        state: of the hidden state that a draft keeps beside the page.
        draft: of the draft's KV pool of its own.
    """

    cache: int
    state: int
    draft: int

    @property
    def all(self) -> int:
        """Bytes of a page in everything that grows with the pages."""
        return self.cache + self.state + self.draft

    def lines(self, number: int, size: int) -> tuple[BudgetLine, ...]:
        """Return the budget lines of ``number`` pages of ``size`` tokens."""
        how = f"{number} pages of {size} tokens, {self.cache // size} bytes per token"
        found = [BudgetLine("kv cache", number * self.cache, how)]
        if self.state:
            how = "the target's hidden state of each page's last token"
            found.append(BudgetLine("page states", number * self.state, how))
        if self.draft:
            how = f"the same pages, {self.draft // size} bytes per token"
            found.append(BudgetLine(DRAFT_CACHE, number * self.draft, how))
        return tuple(found)


def _page_bytes(proposal: Proposal, size: int) -> _PageBytes:
    """Return the bytes of a page of ``size`` tokens."""
    draft = proposal.draft
    return _PageBytes(
        size * kv_token_bytes(proposal),
        page_state_bytes(proposal),
        size * kv_token_bytes(draft) if draft is not None else 0,
    )


def bytes_of_page(proposal: Proposal, size: int) -> int:
    """Return the bytes of a page of ``size`` tokens in everything that grows with the pages."""
    return _page_bytes(proposal, size).all


def least_pool(proposal: Proposal, size: int, budget: Budget) -> int:
    """Return the bytes of the smallest pool with pages of ``size`` tokens that the options allow.

    It has the given tokens or bytes, and room for a sequence of the given ``context_length``.
    """
    memory = proposal.config.memory
    page = bytes_of_page(proposal, size)
    context = proposal.config.context_length
    pages = [2, -(-(memory.kv_tokens or 0) // size) + 1, -(-(memory.kv_bytes or 0) // page)]
    if context is not None:
        pages.append(_sequence_pages(proposal, context, size) + 1)
    if memory.static_fraction is not None:
        share = int(memory.static_fraction * budget.share.memory)
        pages.append((share - budget.weights) // page)
    return max(pages) * page


def kv_token_bytes(proposal: Proposal) -> int:
    """Return the bytes of KV cache of one token on a rank, over all layers."""
    entries = planned_entries(proposal)
    if any(entry.dtype not in DTYPE_BYTES for entry in entries):
        return 1  # refused by ``check_kv_entries``
    return KVLayout(kv_layers(proposal), 1, entries).token_bytes or 1


def page_state_bytes(proposal: Proposal) -> int:
    """Return the bytes kept for a draft beside each page: one hidden state of the target, or 0."""
    speculative = proposal.speculative
    assert speculative is not None
    if not (proposal.values.draft_extends and speculative.offers.first_key):
        return 0
    return proposal.facts.model.hidden_size * DTYPE_BYTES[proposal.values.dtype]


# ---- pages ---------------------------------------------------------------------------------------


def _kv_tokens(
    proposal: Proposal, counts: Counts, budget: Budget, page_bytes: int
) -> Decision | Refusal:
    """Return the decision on the number of tokens in the KV pool (whole pages), or a refusal."""
    memory = proposal.config.memory
    if memory.kv_tokens is not None:
        number = -(-memory.kv_tokens // counts.page_size) + 1
        found = _given_tokens(proposal, "memory.kv_tokens", number, counts, budget, page_bytes)
    elif memory.kv_bytes is not None:
        number = memory.kv_bytes // page_bytes
        found = _given_tokens(proposal, "memory.kv_bytes", number, counts, budget, page_bytes)
    elif memory.static_fraction is not None:
        found = _static_tokens(proposal, memory.static_fraction, counts, budget, page_bytes)
    else:
        found = _auto_tokens(proposal, counts, budget, page_bytes)
    if isinstance(found, Refusal) or counts.groups == 1:
        return found
    return replace(found, why=f"{found.why}; in each of {counts.groups} groups")


def _given_tokens(
    proposal: Proposal, field: str, number: int, counts: Counts, budget: Budget, page_bytes: int
) -> Decision | Refusal:
    """Return the decision for a given size of the KV pool, or a refusal if it does not fit.

    Args:
        field: the option that gives the size.
        number: number of pages in a pool of the given size.
    """
    most = budget.left // page_bytes
    if 2 <= number <= most:
        by, why = proposal.source(field) or ("default", "")
        return Decision("kv.tokens", (number - 1) * counts.page_size, by, why)
    memory = proposal.config.memory
    in_bytes = field == "memory.kv_bytes"
    given = memory.kv_bytes if in_bytes else memory.kv_tokens
    fit = max(2, most) * page_bytes if in_bytes else max(1, (most - 1) * counts.page_size)
    return Refusal(
        "size",
        field,
        f"{given} need {human(number * page_bytes)} of KV cache; "
        f"{human(max(0, budget.left))} of {budget.share.shown} are left "
        f"(at least two pages of {human(page_bytes)} are needed)",
        f"{field} = {fit}",
    )


def _static_tokens(
    proposal: Proposal, fraction: float, counts: Counts, budget: Budget, page_bytes: int
) -> Decision | Refusal:
    """Return the decision for a KV pool that has a share of the memory together with the weights.

    If the share does not fit, return a refusal. ``fraction``: the share.
    """
    field = "memory.static_fraction"
    number = (int(fraction * budget.share.memory) - budget.weights) // page_bytes
    most = budget.left // page_bytes
    if 2 <= number <= most:
        by, why = proposal.source(field) or ("default", "")
        return Decision("kv.tokens", (number - 1) * counts.page_size, by, why)
    return _static_refusal(fraction, number < 2, budget, page_bytes)


def _static_refusal(fraction: float, small: bool, budget: Budget, page_bytes: int) -> Refusal:
    """Return the refusal of a share of weights and KV cache.

    ``small``: the share is too small for a KV cache, not too large for steps and graphs.
    """
    memory = budget.share.memory
    reason = (
        f"{human(int(fraction * memory))} of {human(memory)} are too few for a KV cache"
        if small
        else f"{fraction:g} of {human(memory)} leave too little for steps and graphs"
    )
    most = math.floor(100 * (budget.weights + budget.left) / memory) / 100
    return Refusal(
        "size",
        "memory.static_fraction",
        f"{reason}: weights need {human(budget.weights)}, two pages {human(2 * page_bytes)}, and "
        f"all else {human(budget.needed - budget.weights)} of {budget.share.shown}",
        f"memory.static_fraction = {most:g}, or leave it out",
    )


def _auto_tokens(
    proposal: Proposal, counts: Counts, budget: Budget, page_bytes: int
) -> Decision | Refusal:
    """Return the decision for the default size of the KV pool, or a refusal.

    The pool takes the memory that is left, up to a bound. On a GPU, the bound is ``KV_SPARE``
    times the pages that running sequences can use, so that the prefix cache has room. On a CPU,
    the bound is the pages that running sequences can use, or ``CPU_KV_CAP`` bytes if that is less.
    """
    rows = counts.rows
    context = proposal.config.context_length or proposal.facts.model.max_positions
    each = _sequence_pages(proposal, context, counts.page_size)
    most = budget.left // page_bytes
    limits = {most: "the rest of the memory"}
    if proposal.values.device == "cpu":
        limits[rows * each + 1] = f"{rows} sequences of {context} tokens"
        limits[max(2, CPU_KV_CAP // page_bytes)] = f"at most {human(CPU_KV_CAP)} on a CPU"
    else:
        limits[KV_SPARE * rows * each + 1] = (
            f"{KV_SPARE} times {rows} sequences of {context} tokens"
        )
    number = min(limits)
    if number < 2:
        return Refusal(
            "size",
            "model",
            f"one page of KV cache needs {human(page_bytes)}, {human(most * page_bytes)} are left",
            "more memory, or a smaller model",
        )
    return Decision("kv.tokens", (number - 1) * counts.page_size, "size", limits[number])


def _sequence_pages(proposal: Proposal, context: int, page_size: int) -> int:
    """Return the number of pages that the longest sequence needs.

    ``context``: length of that sequence in tokens, prompt and output.
    """
    return -(-(context + _ahead(proposal)) // page_size)


def _ahead(proposal: Proposal) -> int:
    """Return the number of positions beyond the longest sequence for which a row needs pages.

    ``Sizes.positions`` includes these positions.
    """
    return proposal.values.width + proposal.values.lookahead


# ---- the longest sequence ------------------------------------------------------------------------


def _context(
    proposal: Proposal, number: int, page_size: int, token_bytes: int, memory: str
) -> Decision | Refusal:
    """Return the decision for the longest sequence, or a refusal if a given length does not fit.

    The default is the model's longest sequence, or the longest that the KV pool can hold if that is
    shorter.

    Args:
        number: number of pages in the pool.
        token_bytes: bytes of KV cache of a token.
        memory: the memory of the rank as text.
    """
    field = "context_length"
    given = proposal.config.context_length
    positions = proposal.facts.model.max_positions
    held = (number - 1) * page_size - _ahead(proposal)
    if given is None:
        context = max(1, min(positions, held))
        why = (
            "the model's"
            if context == positions
            else f"as much as the KV cache holds (the model's is {positions})"
        )
        return Decision(field, context, "size", why, notable=context < positions)
    if given > positions:
        return Refusal(
            "size",
            field,
            f"{given} is beyond the model's {positions} positions",
            f"context_length = {positions}",
        )
    if given > held:
        return Refusal(
            "size",
            field,
            f"a sequence of {given} tokens needs {human((given + page_size) * token_bytes)} of KV "
            f"cache, the pool has {human(number * page_size * token_bytes)} of {memory}",
            f"context_length = {max(1, held)}",
        )
    return proposal.given(field, given)
