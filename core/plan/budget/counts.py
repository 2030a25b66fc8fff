"""The first step of sizing: rows, chunk, page size and what graphs capture. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from glowplug.core.plan.budget.captured import Captured, captured_decisions, captured_steps
from glowplug.core.plan.plan import Decision
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.options import DEVICE_DEFAULTS


@dataclass(frozen=True)
class Counts:
    """The counts that limit a step, such as rows and tokens; they do not depend on the byte budget.

    Attributes:
        rows: most running sequences.
        chunk: most prompt tokens of a step.
        page_size: tokens per page.
        step_tokens: most tokens of a step: the chunk and those of all decoding rows.
        expandable_segments: torch's allocator uses expandable segments.
        captured: the steps that the graph runner captures.
        decisions: the decisions for these counts.
    """

    rows: int
    chunk: int
    page_size: int
    step_tokens: int
    expandable_segments: bool
    captured: Captured
    decisions: tuple[Decision, ...]


def decide_counts(proposal: Proposal) -> Counts:
    """Return the counts of a step: as given, else the device's defaults."""
    rows = _rows(proposal)
    chunk = _chunk(proposal)
    page_size = _page_size(proposal)
    segments = _segments(proposal)
    step_tokens = chunk.value + rows.value * proposal.values.width
    captured = captured_steps(proposal, rows.value, step_tokens)
    return Counts(
        rows=rows.value,
        chunk=chunk.value,
        page_size=page_size.value,
        step_tokens=step_tokens,
        expandable_segments=segments is not None and segments.value,
        captured=captured,
        decisions=(
            rows,
            chunk,
            page_size,
            *([segments] if segments is not None else []),
            *captured_decisions(proposal, captured, rows.value, step_tokens),
        ),
    )


def _rows(proposal: Proposal) -> Decision:
    device = proposal.values.device
    return _given_or(
        proposal,
        "scheduler.max_running_requests",
        proposal.config.scheduler.max_running_requests,
        DEVICE_DEFAULTS[device].running,
        f"default on {device}",
    )


def _chunk(proposal: Proposal) -> Decision:
    device = proposal.values.device
    return _given_or(
        proposal,
        "scheduler.chunk_size",
        proposal.config.scheduler.chunk_size,
        DEVICE_DEFAULTS[device].chunk,
        f"default on {device}",
    )


def _page_size(proposal: Proposal) -> Decision:
    """Return the decision for the page size, by default the one nearest to the device's default."""
    attention = proposal.attention
    device = proposal.values.device
    assert attention is not None
    default = DEVICE_DEFAULTS[device].page
    size = default
    why = f"default on {device}"
    if attention.offers.page_sizes and default not in attention.offers.page_sizes:
        size = min(attention.offers.page_sizes, key=lambda size: abs(size - default))
        why = f"a size that {attention.name} reads"
    given = proposal.config.attention.page_size
    return _given_or(proposal, "attention.page_size", given, size, why)


def _given_or(
    proposal: Proposal, path: str, given: int | None, otherwise: int, why: str
) -> Decision:
    """Return the decision for ``path``: ``given``, else ``otherwise`` with the reason ``why``."""
    if given is None:
        return Decision(path, otherwise, "size", why)
    return proposal.given(path, given)


def _segments(proposal: Proposal) -> Decision | None:
    """Return the decision for expandable segments; None on a CPU, whose allocator has none."""
    path = "memory.growing_segments"
    given = proposal.config.memory.growing_segments
    if proposal.values.device != "cuda":
        return None
    if given != "auto":
        return proposal.given(path, given)
    against = _against_segments(proposal)
    why = against or "steps and graphs take less memory, the KV cache gets more"
    return Decision(path, not against, "size", f"auto: {why}")


def _against_segments(proposal: Proposal) -> str:
    """Return why the setting "auto" does not use expandable segments; empty if it uses them."""
    collectives = proposal.collectives
    if collectives is None or collectives.offers.expandable_segments:
        return ""
    return f"{collectives.name} shares memory by handles that expandable segments do not have"
