"""Components that a fix can name instead of a refused one. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from glowplug.core.errors import Refusal
from glowplug.core.plan.proposal import Proposal, chosen_of, options_of
from glowplug.core.plugin.component import CheckContext, Chosen, Component, Options
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.plugin.slots import BY_NAME, Slot


def suggestions(proposal: Proposal, slot: str, fits: Callable[[Any], bool]) -> list[str]:
    """Return the names of components that could replace a refused one in ``slot``.

    All of them have offers that satisfy ``fits``, and can run with this model, machine and
    installed packages. The result is the first of these lists that is not empty:

    1. components that accept all other given options and dtypes,
    2. components that their own checks accept,
    3. all components that can run.
    """
    place = BY_NAME[slot]
    registered = [found.component for found in proposal.plugins.components(slot)]
    candidates = [
        component
        for component in registered
        if fits(component.offers) and _allowed(proposal, component)
    ]
    against = {component.name: _refused(proposal, place, component) for component in candidates}
    use = f"{place.section}.use"
    admitted = [
        component
        for component in candidates
        if all(refusal.field != use for refusal in against[component.name])
    ]
    taking = [
        component
        for component in admitted
        if not against[component.name] and _takes_dtypes(proposal, place, component)
    ]
    return [component.name for component in taking or admitted or candidates]


def _allowed(proposal: Proposal, component: Component) -> bool:
    """Return whether a component can run with this model, machine and installed packages."""
    offers = component.offers
    device = proposal.values.device
    kind = proposal.facts.model.kind
    if device not in offers.devices or kind not in getattr(offers, "kinds", {kind}):
        return False
    if device == "cuda" and not offers.runs_on(
        {card.compute for card in proposal.facts.hardware.devices}
    ):
        return False
    return not missing_packages(component, proposal.facts.software.packages)


def _takes_dtypes(proposal: Proposal, slot: Slot, component: Component) -> bool:
    """Return whether a component supports the compute dtype and the KV cache's dtype."""
    dtype = proposal.values.dtype
    kept = proposal.values.kv_dtype
    offers = component.offers
    return (not slot.step or dtype in offers.dtypes) and kept in getattr(
        offers, "kv_dtypes", {kept}
    )


def _refused(proposal: Proposal, slot: Slot, component: Component) -> list[Refusal]:
    """Return the refusals that a component's own check would yield if chosen for the slot."""
    options = _options(proposal, slot, component)
    if component.check is None or options is None:
        return []
    chosen: dict[str, tuple[Chosen, ...]] = {
        **proposal.chosen,
        slot.name: (chosen_of(component, options),),
    }
    try:
        return list(
            component.check(
                CheckContext(options, proposal.config, proposal.facts, chosen, proposal.values)
            )
        )
    except Exception:  # NOTE: a failing check is reported only if its component is chosen
        return []


def _options(proposal: Proposal, slot: Slot, component: Component) -> Options | None:
    """Return a component's options, with the operator's values for the fields that it has.

    The result is None if the component does not accept these values.
    """
    sections = () if slot.many else proposal.config.section(slot)
    given = {
        name: value
        for options in sections
        for name, value in options.model_dump(
            mode="json", include=options.model_fields_set - {"use"}
        ).items()
        if name in component.options.model_fields
    }
    try:
        return options_of(component, given)
    except ValidationError:
        return None
