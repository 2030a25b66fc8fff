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


def suggestions(draft: Proposal, slot: str, fits: Callable[[Any], bool]) -> list[str]:
    """Return the names of components that could replace a refused one in ``slot``.

    Only components whose offers satisfy ``fits``, and that can run with this model, machine and
    installed packages, are considered. Of these, the result has the ones that accept all other
    given options and dtypes. If there are none, it has those that their own checks accept; if there
    are none either, all.
    """
    place = BY_NAME[slot]
    among = [found.component for found in draft.plugins.components(slot)]
    among = [
        component for component in among if fits(component.offers) and _allowed(draft, component)
    ]
    against = {component.name: _refused(draft, place, component) for component in among}
    use = f"{place.section}.use"
    admitted = [
        component
        for component in among
        if all(refusal.field != use for refusal in against[component.name])
    ]
    taking = [
        component
        for component in admitted
        if not against[component.name] and _takes_dtypes(draft, place, component)
    ]
    return [component.name for component in taking or admitted or among]


def _allowed(draft: Proposal, component: Component) -> bool:
    """Return whether a component can run with this model, machine and installed packages."""
    offers = component.offers
    device = draft.values["device"]
    kind = draft.facts.model.kind
    if device not in offers.devices or kind not in getattr(offers, "kinds", {kind}):
        return False
    if device == "cuda" and not offers.runs_on(
        {card.compute for card in draft.facts.hardware.devices}
    ):
        return False
    return not missing_packages(component, draft.facts.software.packages)


def _takes_dtypes(draft: Proposal, slot: Slot, component: Component) -> bool:
    """Return whether a component supports the compute dtype and the KV cache's dtype."""
    dtype = draft.values["dtype"]
    kept = draft.values["kv_dtype"]
    offers = component.offers
    return (not slot.step or dtype in offers.dtypes) and kept in getattr(
        offers, "kv_dtypes", {kept}
    )


def _refused(draft: Proposal, slot: Slot, component: Component) -> list[Refusal]:
    """Return the refusals of a component's own check if it were chosen for the slot."""
    options = _options(draft, slot, component)
    if component.check is None or options is None:
        return []
    chosen: dict[str, tuple[Chosen, ...]] = {
        **draft.chosen,
        slot.name: (chosen_of(component, options),),
    }
    try:
        return list(
            component.check(CheckContext(options, draft.config, draft.facts, chosen, draft.values))
        )
    except Exception:  # NOTE: a failing check is reported only if its component is chosen
        return []


def _options(draft: Proposal, slot: Slot, component: Component) -> Options | None:
    """Return a component's options with those given values that it has fields for.

    Return None if it does not accept these values.
    """
    asked = () if slot.many else draft.config.section(slot)
    given = {
        name: value
        for options in asked
        for name, value in options.model_dump(
            mode="json", include=options.model_fields_set - {"use"}
        ).items()
        if name in component.options.model_fields
    }
    try:
        return options_of(component, given)
    except ValidationError:
        return None
