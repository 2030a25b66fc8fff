"""Components that a fix can name instead of a refused one. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from glowplug.core.errors import Refusal
from glowplug.core.plan.proposal import Proposal, chosen_of, given_options, options_of
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
    sections = () if place.many else proposal.config.section(place)
    given = given_options(sections[0]) if sections else {}
    against = {
        component.name: _refused(proposal, place, component, given) for component in candidates
    }
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
    if device not in offers.devices or kind not in getattr(offers, "kinds", (kind,)):
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


def _refused(
    proposal: Proposal, slot: Slot, component: Component, given: Mapping[str, Any]
) -> list[Refusal]:
    """Return the refusals that a component's own check would yield if chosen for the slot.

    ``given``: the values that the slot's section of the configuration states.
    """
    if component.check is None:
        return []
    options = _options(component, given)
    if options is None:
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


def _options(component: Component, given: Mapping[str, Any]) -> Options | None:
    """Return a component's options, with the ``given`` values for the fields that it has.

    The result is None if the component does not accept these values.
    """
    fields = component.options.model_fields
    try:
        return options_of(
            component, {name: value for name, value in given.items() if name in fields}
        )
    except ValidationError:
        return None
