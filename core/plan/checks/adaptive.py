"""Choice and check of ``speculative.adaptive`` and its table of costs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plan.checks.rules import reads
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape, shorter_shapes

FIELD = "speculative.adaptive"
TABLE = "speculative.cost_table"
TUNE = "glowplug tune speculative writes one"


def possible_shapes(proposal: Proposal) -> tuple[DraftShape, ...]:
    """Return ``Decided.draft_shapes`` for the components chosen so far."""
    shape = proposal.values.draft_shape
    if _adapts(proposal):
        return shorter_shapes(shape)
    return (NO_DRAFTS, shape) if _foresees(proposal) else (shape,)


def decide_adaptive(proposal: Proposal) -> None:
    """Record the decision on ``speculative.adaptive``, if tokens are drafted."""
    speculative = proposal.speculative
    if speculative is None or not speculative.offers.drafts:
        return
    source = proposal.source(FIELD)
    loose = _unable(proposal)
    shapes = proposal.values.draft_shapes
    names = ", ".join(str(shape) if shape.steps else "none" for shape in shapes)
    if source is not None:
        proposal.decide(FIELD, speculative.options.adaptive, *source)
    elif loose:
        proposal.decide(FIELD, False, "auto", f"{loose} has drafts of one size only")
    else:
        why = f"steps choose among drafts of {names} (steps/topk/tokens)"
        proposal.decide(FIELD, speculative.options.adaptive, "default", why)


@reads("speculative", "scheduler")
def check_adaptive(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse drafts of changing size, if given, with a component that has one size only."""
    speculative = proposal.speculative
    if speculative is None or not speculative.offers.drafts:
        return
    loose = _unable(proposal)
    if loose and speculative.options.adaptive and proposal.written(FIELD):
        yield Refusal(
            "speculative",
            FIELD,
            f"{loose} has drafts of one size only",
            f"{FIELD} = false, or leave it out",
        )
    yield from _table_refusals(proposal)


def given_costs(proposal: Proposal) -> DraftCosts | None:
    """Return the given table of costs; None if there is none, or drafts do not change."""
    speculative = proposal.speculative
    if speculative is None or not speculative.options.cost_table or not _adapts(proposal):
        return None
    return DraftCosts.read(speculative.options.cost_table)


def _table_refusals(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a table of costs that cannot be read or lacks a size of the drafts."""
    speculative = proposal.speculative
    if speculative is None or not speculative.options.cost_table or not _adapts(proposal):
        return
    path = speculative.options.cost_table
    fix = f"a table for this configuration: {TUNE}; or leave it out"
    try:
        costs = DraftCosts.read(path)
    except (OSError, ValueError) as error:
        yield Refusal("speculative", TABLE, f"{path} cannot be used: {error}", fix)
        return
    lacking = costs.lacking(proposal.values.draft_shapes)
    if lacking:
        names = ", ".join(map(str, lacking))
        reason = f"{path} has no seconds for drafts of {names} (steps/topk/tokens)"
        yield Refusal("speculative", TABLE, reason, fix)


def _adapts(proposal: Proposal) -> bool:
    """Return whether the size of the drafts may change from step to step."""
    speculative = proposal.speculative
    return (
        speculative is not None
        and speculative.offers.drafts
        and speculative.options.adaptive
        and not _unable(proposal)
    )


def _foresees(proposal: Proposal) -> bool:
    """Return whether steps none of whose rows has drafts are plain decoding steps."""
    speculative = proposal.speculative
    return (
        speculative is not None
        and speculative.offers.foresees
        and speculative.options.simulate_accept_rates is None
        and not _unable(proposal)
    )


def _unable(proposal: Proposal) -> str:
    """Return the name of a chosen component with drafts of one size only; "" if there is none."""
    chosen = (proposal.speculative, proposal.scheduler)
    return next((one.name for one in chosen if one is not None and not one.offers.adapts), "")
