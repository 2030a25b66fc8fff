"""The first step of sizing: rows, chunk, page size and what graphs capture. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glowplug.core.facts.mesh import group_share
from glowplug.core.plan.budget.captured import Captured, captured_decisions, captured_steps
from glowplug.core.plan.plan import Decision
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.options import DEVICE_DEFAULTS


@dataclass(frozen=True)
class Counts:
    """The counts that limit a step, such as rows and tokens; they do not depend on the byte budget.

    The operator's limits are those of the whole engine. With data-parallel attention, each dp group
    has an equal share of them, rounded up, and the attributes are the limits of one group.

    Attributes:
        groups: number of dp groups; 1 without data-parallel attention.
        rows: most running sequences.
        queued: most waiting sequences.
        chunk: most prompt tokens of a step.
        page_size: tokens per page.
        step_tokens: most tokens of a step: the chunk and those of all decoding rows.
        expandable_segments: torch's allocator uses expandable segments.
        captured: the steps that the graph runner captures.
        decisions: the decisions for these counts.
    """

    groups: int
    rows: int
    queued: int
    chunk: int
    page_size: int
    step_tokens: int
    expandable_segments: bool
    captured: Captured
    decisions: tuple[Decision, ...]


def decide_counts(proposal: Proposal) -> Counts:
    """Return the counts of a step: as given, else the device's defaults."""
    groups = proposal.values.mesh.get("dp", 1)
    rows = _rows(proposal, groups)
    chunk = _chunk(proposal)
    queued = _queued(proposal)
    page_size = decide_page_size(proposal)
    segments = _segments(proposal)
    row_share, queue_share, chunk_share = (
        group_share(limit.value, proposal.values.mesh) for limit in (rows, queued, chunk)
    )
    step_tokens = chunk_share + row_share * proposal.values.width
    captured = captured_steps(proposal, row_share, step_tokens)
    return Counts(
        groups=groups,
        rows=row_share,
        queued=queue_share,
        chunk=chunk_share,
        page_size=page_size.value,
        step_tokens=step_tokens,
        expandable_segments=segments is not None and segments.value,
        captured=captured,
        decisions=(
            _shared(rows, groups, row_share, "request"),
            _shared(chunk, groups, chunk_share, "token"),
            *([_shared(queued, groups, queue_share, "request")] if groups > 1 else []),
            page_size,
            *([segments] if segments is not None else []),
            *captured_decisions(proposal, captured, row_share, step_tokens),
        ),
    )


def _shared(limit: Decision, groups: int, share: int, unit: str) -> Decision:
    """Return the decision for a limit of the whole engine, with each group's share in its reason.

    Args:
        limit: the decision.
        groups: number of dp groups.
        share: the limit of one group.
        unit: what the limit counts, in the singular.
    """
    if groups == 1:
        return limit
    how = f"{limit.value} {unit}{'s' * (limit.value != 1)} over {groups} groups: {share} a group"
    if share * groups != limit.value:
        how += f", rounded up to {share * groups} in all"
    return replace(limit, why="; ".join(filter(None, (limit.why, how))), notable=True)


def _rows(proposal: Proposal, groups: int) -> Decision:
    """Return the decision for the most running sequences of the whole engine.

    By default, each group runs as many as an engine without groups, because it has a KV cache of
    its own.
    """
    device = proposal.values.device
    default = DEVICE_DEFAULTS[device].running
    return _given_or(
        proposal,
        "scheduler.max_running_requests",
        proposal.config.scheduler.max_running_requests,
        default * groups,
        f"default on {device}" + (f", {default} for each group" if groups > 1 else ""),
    )


def _queued(proposal: Proposal) -> Decision:
    field = "scheduler.max_queued_requests"
    return proposal.given(field, proposal.config.scheduler.max_queued_requests)


def _chunk(proposal: Proposal) -> Decision:
    device = proposal.values.device
    return _given_or(
        proposal,
        "scheduler.chunk_size",
        proposal.config.scheduler.chunk_size,
        DEVICE_DEFAULTS[device].chunk,
        f"default on {device}",
    )


def decide_page_size(proposal: Proposal) -> Decision:
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
