"""The options of a plan as a configuration: every option with its value and its source. No torch.

Read back, the configuration gives the same components and sizes on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from glowplug.core.config.schema import EngineConfig, canonical
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.options import Section
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.slots import SLOTS, Slot

#: options of the whole engine whose decided value is that of one group of ranks
DECIDED_PER_GROUP = frozenset({"graphs.batch_sizes"})
LEFT_OPEN = (None, "auto")  #: values that leave a choice to the plan


@dataclass(frozen=True)
class ResolvedOption:
    """One option of the configuration.

    Attributes:
        path: dotted path; items of a list are numbered.
        value: its value, as JSON has it.
        source: where the value comes from, one clause.
    """

    path: str
    value: Any
    source: str


def given_options(plan: EnginePlan) -> list[ResolvedOption]:
    """Return the options that the operator gave, in order."""
    sources = _sources(plan)
    return [
        ResolvedOption(path, value, sources.get(path, "operator"))
        for path, value in _leaves("", plan.config)
    ]


def resolved_options(plan: EnginePlan, plugins: PluginSet) -> list[ResolvedOption]:
    """Return every option of the plan's components and of the other sections.

    An option that was left open has the value that the plan decided.
    """
    sources = _sources(plan)
    decided = _decided(plan)
    found = [
        ResolvedOption(path, value, sources.get(path, "default"))
        for path, value in _fixed_options(plan, decided)
    ]
    for slot in SLOTS:
        choices = plan.choices_in(slot.name) if slot.section else ()
        if slot.section and not choices and slot.many:
            found.append(ResolvedOption(slot.section, [], "none"))
        for number, choice in enumerate(choices):
            prefix = f"{slot.section}.{number}" if slot.many else slot.section
            options = _component_options(slot, choice, plugins, decided, prefix)
            given = _given_section(plan, slot, number, choice, plugins)
            for name, value in {**options, **given}.items():
                path = f"{prefix}.{name}"
                found.append(ResolvedOption(path, value, sources.get(path, "default")))
    return found


def _decided(plan: EnginePlan) -> dict[str, Any]:
    """Return the decided values by dotted path, for the whole engine."""
    found = {decision.field: decision.value for decision in plan.decisions}
    for path in DECIDED_PER_GROUP & found.keys():
        if isinstance(found[path], list | tuple):
            found[path] = [plan.sizes.groups * size for size in found[path]]
    return found


def _sources(plan: EnginePlan) -> dict[str, str]:
    """Return the origin and reason of each decided value, by dotted path."""
    return {
        decision.field: f"{decision.by}: {decision.why}" if decision.why else decision.by
        for decision in plan.decisions
    }


def _fixed_options(plan: EnginePlan, decided: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the top level's options and of the sections without components."""
    given = {key: value for key, value in plan.config.items() if key in EngineConfig.model_fields}
    config = EngineConfig.model_validate_json(msgspec.json.encode({"model": plan.model, **given}))
    dumped = config.model_dump(mode="json")
    for key in EngineConfig.model_fields:
        if isinstance(getattr(config, key), Section):
            yield from ((f"{key}.{name}", value) for name, value in dumped[key].items())
        else:
            open_here = dumped[key] in LEFT_OPEN and key in decided
            value = decided[key] if open_here else dumped[key]
            yield key, value if _is_valid(EngineConfig, dumped, key, value) else dumped[key]


def _component_options(
    slot: Slot, choice: Choice, plugins: PluginSet, decided: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Return the options of a chosen component, with the values that the plan decided."""
    registration = plugins.find(slot.name, choice.name)
    options = dict(choice.options)
    if registration is None:
        return options
    for name, value in choice.options.items():
        path = f"{prefix}.{name}"
        if value in LEFT_OPEN and path in decided and name != "use":
            if _is_valid(registration.component.options, options, name, decided[path]):
                options[name] = decided[path]
    return options


def _is_valid(model: type[BaseModel], values: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether ``value`` is a value of the option ``name``, as JSON has it."""
    try:
        model.model_validate_json(msgspec.json.encode({**values, name: value}))
    except (ValidationError, TypeError):
        return False
    return True


def _given_section(
    plan: EnginePlan, slot: Slot, number: int, choice: Choice, plugins: PluginSet
) -> dict[str, Any]:
    """Return the operator's options of a chosen component, except those left open and ``use``."""
    section = plan.config.get(slot.section)
    if slot.many:
        items = section if isinstance(section, list) else []
        section = items[number] if number < len(items) else None
    if not isinstance(section, dict):
        return {}
    use = canonical(slot, str(section.get("use", "auto")), plugins)
    if use not in (choice.name, "auto"):
        return {}
    return {
        name: value for name, value in section.items() if name != "use" and value not in LEFT_OPEN
    }


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each value in a nested configuration."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}.{number}", item)
    else:
        yield path, value
