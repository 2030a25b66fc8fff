"""The check of one component as its plugin declares it. Plan zone: no torch."""

from __future__ import annotations

from typing import Any, get_args

from glowplug.core.plugin import offers as offers_module
from glowplug.core.plugin.component import Component, Options
from glowplug.core.plugin.declared.words import wrong_words
from glowplug.core.plugin.options import OPTION_BASES
from glowplug.core.plugin.slots import Slot


def component_fault(component: Any, slot: Slot) -> str | None:
    """Return why a component is not built as the resolver expects; None if it is."""
    if not isinstance(component, Component):
        return f"{component!r} is not a Component"
    offers = getattr(offers_module, slot.offers)
    if not isinstance(component.offers, offers):
        return (
            f"{component.name!r} has offers of type {type(component.offers).__name__}, "
            f"expected {slot.offers}"
        )
    wrong = "; ".join(wrong_words(component.offers))
    if wrong:
        return f"the offers of {component.name!r}: {wrong}"
    return _options_fault(component, slot) or _tier_fault(component) or _name_fault(component)


def _options_fault(component: Component, slot: Slot) -> str | None:
    base = OPTION_BASES.get(slot.name, Options)
    if not (isinstance(component.options, type) and issubclass(component.options, base)):
        return f"the options of {component.name!r} must be a subclass of {base.__name__}"
    named = get_args(component.options.model_fields["use"].annotation)
    if slot.section and component.name not in named:
        return f"the options of {component.name!r} must declare use: Literal[{component.name!r}]"
    return None


def _tier_fault(component: Component) -> str | None:
    """Return why the tier that a cache offers cannot be sized; None if it can."""
    tier = getattr(component.offers, "tier", None)
    if tier is None:
        return None
    found = component.options.model_fields.get(tier.option)
    if found is None or found.annotation is not int:
        return (
            f"{component.name!r} offers a tier whose bytes are in the option {tier.option!r}; its "
            "options must declare it as an int"
        )
    return None


def _name_fault(component: Component) -> str | None:
    if component.name == "auto":
        return "the name 'auto' is reserved: it lets the plan choose"
    if ":" not in component.factory:
        return (
            f"the factory of {component.name!r} must have the form 'package.module:Class', "
            f"not {component.factory!r}"
        )
    return None
