"""Which components a fix may name instead of one that is refused. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from glowplug.core.errors import Refusal
from glowplug.core.plan.proposal import Draft, chosen_of, options_of
from glowplug.core.plugin.component import CheckContext, Chosen, Component, Options
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.plugin.slots import BY_NAME, Slot


def suggestions(draft: Draft, slot: str, fits: Callable[[Any], bool]) -> list[str]:
    """Names of the slot's components whose offers satisfy ``fits``, of those that this model, this
    machine and what is
    installed on it allow: the ones that take what else was asked for; if none does, those that
    their own checks admit; if these admit none, all, each of which says why when it is chosen."""
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


def _allowed(draft: Draft, component: Component) -> bool:
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


def _takes_dtypes(draft: Draft, slot: Slot, component: Component) -> bool:
    dtype = draft.values["dtype"]
    kept = draft.values["kv_dtype"]
    offers = component.offers
    return (not slot.step or dtype in offers.dtypes) and kept in getattr(
        offers, "kv_dtypes", {kept}
    )


def _refused(draft: Draft, slot: Slot, component: Component) -> list[Refusal]:
    """By the component's own check, in the place of what the slot holds."""
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
    except (
        Exception
    ):  # NOTE: a check that fails is said where its component is chosen, not where it might be.
        return []


def _options(draft: Draft, slot: Slot, component: Component) -> Options | None:
    """What the component would be given: of the options asked for those that it has. None: it does
    not take them.
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
