"""Registration of checks, and refusals in a common form. Plan zone: no torch.

A check is a pure function of the proposal that yields refusals. It reads offers and facts, never
names, and is registered under the slots that it reads. While a slot's candidates are tried, only
the slot's checks run; at the end all of them do (``run.py``). A check skips slots that are
still empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from glowplug.core.errors import Refusal
from glowplug.core.plan.checks.suggestions import suggestions
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import Chosen
from glowplug.core.plugin.slots import BY_NAME, Slot

Check = Callable[[Proposal], Iterator[Refusal]]
#: every registered check -> slots that it reads
READS: dict[Check, tuple[str, ...]] = {}


def reads(*slots: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a check under the slots whose components it reads."""

    def register(check: Check) -> Check:
        READS[check] = slots
        return check

    return register


def use_field(proposal: Proposal, slot: Slot, chosen: Chosen) -> str:
    """Return the configuration path where the operator chooses this component."""
    if not slot.section:
        return "model"
    if not slot.many:
        return f"{slot.section}.use"
    held = proposal.chosen[slot.name]
    return f"{slot.section}.{held.index(chosen) if chosen in held else 0}.use"


def refuse(
    proposal: Proposal, slot: str, chosen: Chosen, reason: str, fix: str, field: str = ""
) -> Refusal:
    """Return the refusal of a chosen component; ``field`` is by default the path of its ``use``."""
    return Refusal(
        by=chosen.name,
        field=field or use_field(proposal, BY_NAME[slot], chosen),
        reason=reason,
        fix=fix,
        origin=proposal.origin(slot, chosen.name),
    )


def instead(proposal: Proposal, slot: str, fits: Callable[[Any], bool], otherwise: str) -> str:
    """Return a fix that names components whose offers pass ``fits``, if any; else ``otherwise``."""
    section = BY_NAME[slot].section or slot
    wanted = proposal.trial is None or proposal.trial.fixes
    names = suggestions(proposal, slot, fits) if wanted else []
    return f"{section}.use = " + " or ".join(f'"{name}"' for name in names) if names else otherwise


def listed(values: Any) -> str:
    """Return values as text, sorted and separated by commas."""
    return ", ".join(str(value) for value in sorted(values))
