"""Check of a simulated acceptance of drafts, for benchmarks only. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plan.checks.rules import instead, reads, refuse
from glowplug.core.plan.proposal import Proposal

FIELD = "speculative.simulate_accept_rates"


@reads("speculative")
def check_simulated_acceptance(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a simulated acceptance outside benchmarks, without drafts, or of too many positions.

    The field is common to all algorithms, but only those can simulate that verify their drafts by
    the common code.
    """
    chosen = proposal.speculative
    if chosen is None or chosen.options.simulate_accept_rates is None:
        return
    rates = chosen.options.simulate_accept_rates
    depth = proposal.values.draft_shape.steps
    if not proposal.config.benchmark:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            "the answers of a simulated acceptance are meaningless, and this engine is not one of "
            "a benchmark",
            f"leave {FIELD} out, use --simulate-accept-length of a glowplug bench command, or set "
            "benchmark = true in an engine that only a benchmark reads",
            field=FIELD,
        )
    if not chosen.offers.simulates:
        what = "drafts nothing" if not chosen.offers.drafts else "verifies drafts in its own way"
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{chosen.name} {what}, so no acceptance can be simulated",
            instead(proposal, "speculative", lambda o: o.simulates, f"leave {FIELD} out"),
            field=FIELD,
        )
    elif len(rates) > depth:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"there are rates for {len(rates)} positions, but the drafts are {depth} deep: a step "
            f"gains {depth + 1} tokens at most",
            f"give {depth} rate{'s' * (depth > 1)}, or draft {len(rates)} tokens deep",
            field=FIELD,
        )
