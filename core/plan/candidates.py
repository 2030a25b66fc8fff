"""Candidates for a slot: trying them in order of preference, and what refuses each. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.checks.components import component_checks, provider_checks
from glowplug.core.plan.checks.contracts import since
from glowplug.core.plan.checks.rules import use_field
from glowplug.core.plan.checks.run import run_checks
from glowplug.core.plan.proposal import Proposal, Trial, chosen_of, given_options, options_of
from glowplug.core.plugin.component import CONTRACT, Chosen, Component
from glowplug.core.plugin.loading import Registration
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.plugin.slots import Slot


def pick(proposal: Proposal, slot: Slot) -> None:
    """Fill an open slot with the first candidate that no check refuses, or add a refusal."""
    candidates = _candidates(proposal, slot)
    (section,) = proposal.config.section(slot)
    given = given_options(section)
    refused: list[tuple[Registration, Refusal]] = []
    proposal.trial = Trial(slot.name, fixes=False)
    for candidate in candidates:
        refusal = _try(proposal, slot, candidate, given)
        if refusal is None:
            _record(proposal, slot, candidate.component, refused)
            break
        refused.append((candidate, refusal))
    else:
        proposal.trial = Trial(slot.name, fixes=True)
        failed = [
            refusal
            for candidate in candidates
            if (refusal := _try(proposal, slot, candidate, given))
        ]
        proposal.chosen[slot.name] = ()
        proposal.refusals.append(_nothing_fits(slot, failed))
    proposal.trial = None


def contributed(proposal: Proposal, slot: Slot) -> str:
    """Return the component's name that a plugin or the caller sets as the slot's default.

    The result is "" if neither sets a default, or if the operator's ``use`` replaces it.
    """
    path = f"{slot.section}.use"
    return (
        proposal.config.section(slot)[0].use
        if path in proposal.parsed.origins and not proposal.written(path)
        else ""
    )


def _candidates(proposal: Proposal, slot: Slot) -> list[Registration]:
    """Return the candidates for an open slot in order of preference.

    The default that a plugin or the caller sets is first. If any candidate supports the model's
    attention kind, candidates that do not support it are left out.
    """
    kind = proposal.facts.model.kind
    wanted = contributed(proposal, slot)
    registered = proposal.plugins.components(slot.name)
    if wanted:
        registered = sorted(registered, key=lambda found: found.component.name != wanted)
    any_kind = (kind,)
    of_kind = [
        found for found in registered if kind in getattr(found.component.offers, "kinds", any_kind)
    ]
    return _by_measured_time(proposal, slot, of_kind or registered)


def _by_measured_time(
    proposal: Proposal, slot: Slot, candidates: list[Registration]
) -> list[Registration]:
    """Return ``candidates`` with the measured ones in the order of their times.

    They take the places of each other; the others keep theirs. A time is what a candidate's
    ``measured`` returns, see ``AttentionOffers``.
    """
    times: dict[str, float] = {}
    for found in candidates:
        measured = getattr(found.component.offers, "measured", None)
        if measured is None:
            continue
        (section,) = proposal.config.section(slot)
        time = measured(proposal.context(section))
        if time is not None:
            times[found.component.name] = time
    if len(times) < 2:
        return candidates
    known = [found for found in candidates if found.component.name in times]
    ordered = iter(sorted(known, key=lambda found: times[found.component.name]))
    return [next(ordered) if found in known else found for found in candidates]


def _record(
    proposal: Proposal,
    slot: Slot,
    component: Component,
    refused: list[tuple[Registration, Refusal]],
) -> None:
    """Record the decision that ``component`` fills the slot, with the reason.

    Args:
        refused: the candidates tried before ``component``, each with its first refusal.
    """
    field = f"{slot.section}.use"
    source = proposal.source(field) if component.name == contributed(proposal, slot) else None
    if not refused:
        by, why = source or ("auto", component.summary or "first that fits")
        proposal.decide(field, component.name, by, why)
        return
    device = proposal.values.device
    by, why = source or ("auto", "; ".join(refusal.reason for _, refusal in refused))
    notable = any(device in other.component.offers.devices for other, _ in refused)
    proposal.decide(field, component.name, by, why, notable)


def _try(
    proposal: Proposal, slot: Slot, found: Registration, given: Mapping[str, Any]
) -> Refusal | None:
    """Put the candidate ``found`` into the slot, with the options given for the slot.

    Args:
        given: the options that the operator, a plugin or the caller gave for the slot.

    Returns:
        The first refusal of the candidate, or None if it fits.
    """
    component = found.component
    try:
        options = options_of(component, given)
    except ValidationError as error:  # the candidate narrows an option of the slot's base
        problem = error.errors(include_url=False)[0]
        key = str(problem["loc"][0])
        return Refusal(
            component.name,
            f"{slot.section}.{key}",
            f"{component.name} does not accept {given.get(key)!r}: {problem['msg']}",
            f"another {slot.section}.{key}",
            proposal.origin(slot.name, component.name),
        )
    chosen = chosen_of(component, options)
    proposal.chosen[slot.name] = (chosen,)
    return against(proposal, slot, component, chosen)


def against(proposal: Proposal, slot: Slot, component: Component, chosen: Chosen) -> Refusal | None:
    """Return the first refusal that the candidate in the slot causes, or None.

    A refusal that would also occur if the slot were empty does not count.
    """
    for refusal in component_checks(proposal, slot, component, chosen):
        return refusal
    refusals = run_checks(proposal)
    if refusals:
        proposal.chosen[slot.name] = ()
        before = set(run_checks(proposal))
        proposal.chosen[slot.name] = (chosen,)
        refusals = [refusal for refusal in refusals if refusal not in before]
    return next(iter(refusals or unfit(proposal, slot, component, chosen)), None)


def unfit(proposal: Proposal, slot: Slot, component: Component, chosen: Chosen) -> list[Refusal]:
    """Return the refusals of a component's own check, and of missing libraries for its GEMMs.

    Libraries are not checked if the own check refuses the component as a whole, because no
    library would help then.
    """
    own = own_check(proposal, slot, component, chosen)
    if own:
        use = use_field(proposal, slot, chosen)
        if any(refusal.field == use for refusal in own):
            return own
    if not component.uses:
        return own
    return [*own, *provider_checks(proposal, slot, component, chosen)]


def own_check(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> list[Refusal]:
    """Return the refusals of the component's own check.

    An exception in the check becomes a refusal that names the component's distribution.
    """
    if component.check is None:
        return []
    try:
        refusals = list(component.check(proposal.context(chosen.options)))
        if not refusals:
            return []
        origin = proposal.origin(slot.name, chosen.name)
        return [Refusal(r.by, r.field, r.reason, r.fix, origin) for r in refusals]
    except Exception as error:
        origin = proposal.origin(slot.name, chosen.name)
        reason = f"its check failed with {type(error).__name__}: {error}"
        fix = f"report it to {origin}; choose another component meanwhile"
        return [Refusal(chosen.name, slot.section or slot.name, reason, fix, origin)]


def _nothing_fits(slot: Slot, failed: list[Refusal]) -> Refusal:
    """Return one refusal for a slot without a fitting candidate.

    Args:
        failed: the first refusal of each candidate.
    """
    if not failed:
        return Refusal(
            "choose",
            f"{slot.section}.use",
            f"no {slot.name} component is registered",
            "load a plugin that registers one (see glowplug plugins)",
        )
    if len(failed) == 1:
        return failed[0]
    # NOTE: a candidate refused because of an option (a dtype, a page size) fits after the option is
    # changed, so its fix is preferred. A fix that names another candidate is useless here if that
    # candidate does not fit either.
    use = f"{slot.section}.use"
    whole = [
        refusal
        for refusal in failed
        if not any(
            f'{use} = "{other.by}"' in refusal.fix for other in failed if other.by != refusal.by
        )
    ]
    best = next((refusal for refusal in failed if refusal.field != use), (whole or failed[-1:])[0])
    reason = "; ".join(refusal.reason for refusal in failed)
    return Refusal("choose", best.field, f"no {slot.name} component fits: {reason}", best.fix)


def unavailable(
    component: Component, slot: str, packages: Mapping[str, str], machine: HardwareFacts
) -> str:
    """Return the reason why a component cannot run on ``machine``; "" if it can.

    Missing packages are named only if their installation would help.

    Args:
        slot: name of its slot.
        packages: version of each installed package by name.
    """
    if since(component.contract, slot):
        return f"written for contract {component.contract}, this is {CONTRACT}"
    offers = component.offers
    if "cpu" not in offers.devices:
        if not machine.devices:
            return "no GPU here"
        if "+cpu" in packages.get("torch", ""):
            return "torch is a CPU build"
        if not offers.runs_on({card.compute for card in machine.devices}):
            return f"not for {machine.devices[0].name}"
    missing = missing_packages(component, packages)
    return "; ".join(f"needs {requirement} ({found})" for requirement, found in missing)
