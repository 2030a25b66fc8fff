"""The generic checks of a proposal, all of them or those of a trial. Plan zone: no torch."""

from __future__ import annotations

from glowplug.core.errors import Refusal
from glowplug.core.plan.checks import (
    adaptive,
    attention,
    checkpoint,
    draft_models,
    eagle_heads,
    last_layer,
    ranks,
    simulation,
    speculation,
    steps,
)
from glowplug.core.plan.checks.rules import READS, Check
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.slots import SLOTS

#: modules with checks, in the order of their refusals
MODULES = (
    last_layer,
    ranks,
    speculation,
    adaptive,
    draft_models,
    eagle_heads,
    simulation,
    checkpoint,
    attention,
    steps,
)
_PLACES = {module.__name__: place for place, module in enumerate(MODULES)}
#: all checks, in the order of their refusals
CHECKS: tuple[Check, ...] = tuple(sorted(READS, key=lambda check: _PLACES[check.__module__]))
#: slot -> checks that read it
BY_SLOT = {
    slot.name: tuple(check for check in CHECKS if slot.name in READS[check]) for slot in SLOTS
}


def run_checks(proposal: Proposal) -> list[Refusal]:
    """Return the refusals of all checks; during a trial, only of checks that read its slot."""
    checks = CHECKS if proposal.trial is None else BY_SLOT[proposal.trial.slot]
    return [refusal for check in checks for refusal in check(proposal)]
