"""The proposal: a plan under construction, filled in by the passes. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from glowplug.core.config.errors import place
from glowplug.core.config.parse import Parsed
from glowplug.core.config.schema import EngineConfig
from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import Facts
from glowplug.core.facts.weight_classes import Tally
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Chosen, Component, Options
from glowplug.core.plugin.decided import Decided
from glowplug.core.plugin.options import Section
from glowplug.core.plugin.slots import BY_NAME, SLOTS, Slot

if TYPE_CHECKING:
    from glowplug.core.plugin.registry import PluginSet

STEP_SLOTS = tuple(slot for slot in SLOTS if slot.step)
#: slots whose choice decides which modes run and which are captured; "" while no slot is chosen
SHAPES_STEPS = frozenset({"", "speculative", "graphs", "parallel"})


@dataclass
class Proposal:
    """A plan under construction.

    Attributes:
        plugins: the loaded plugins.
        parsed: the parsed configuration.
        facts: facts about model, hardware and software.
        elements: element counts of the checkpoint by kind (``weight_classes.tally``).
        draft_elements: element counts of the draft model's own folder.
        refusals: refusals found so far.
        decisions: decisions made so far.
        values: decided values that checks and the byte budget read.
        chosen: components chosen so far by slot; every slot is a key.
        focus: slot that is being chosen; "" for none. Components of other slots that its choice
            does not affect are not checked again.
        trying: a candidate is being tried, so fixes of refusals are not computed.
        picked: slots whose component the plan chose, which therefore fits device, dtype and
            packages.
    """

    plugins: PluginSet
    parsed: Parsed
    facts: Facts
    elements: Tally
    draft_elements: Tally = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    values: Decided = field(default_factory=Decided)
    chosen: dict[str, tuple[Chosen, ...]] = field(
        default_factory=lambda: {slot.name: () for slot in SLOTS}
    )
    focus: str = ""
    trying: bool = False
    picked: set[str] = field(default_factory=set)

    @property
    def config(self) -> EngineConfig:
        """The parsed configuration."""
        return self.parsed.config

    def decide(self, field: str, value: Any, by: str, why: str, notable: bool = False) -> None:
        """Record a decision; the arguments are the fields of ``Decision``."""
        self.decisions.append(Decision(field, value, by, why, notable))

    def written(self, path: str) -> bool:
        """Return whether the operator gave a value for ``path``."""
        return path in self.parsed.operator

    def source(self, path: str) -> tuple[str, str] | None:
        """Return (by, why) of a value that was given or contributed, else None."""
        if path in self.parsed.operator:
            return "operator", place(path, self.parsed.origins) or "given"
        if path in self.parsed.origins:
            return self.parsed.origins[path], "contributed default"
        return None

    def first(self, slot: str) -> Chosen | None:
        """Return the first component chosen for ``slot``, or None."""
        held = self.chosen[slot]
        return held[0] if held else None

    def step_path(self) -> Iterable[tuple[Slot, Chosen]]:
        """Yield the components that take part in a step, with their slots.

        While a slot is being chosen, only the components that its choice affects are included.
        """
        slots = STEP_SLOTS if self.focus in SHAPES_STEPS else (BY_NAME[self.focus],)
        for slot in slots:
            for chosen in self.chosen[slot.name]:
                yield slot, chosen

    def origin(self, slot: str, name: str) -> str:
        """Return distribution and version of a component for refusals."""
        return self.plugins.source_of(slot, name).origin

    def context(self, options: Options | Section) -> CheckContext:
        """Return the context of a check of the component with these ``options``."""
        return CheckContext(options, self.config, self.facts, self.chosen, self.values)


def options_of(component: Component, given: Mapping[str, Any] = MappingProxyType({})) -> Options:
    """Return the component's options with the ``given`` values.

    Raises:
        ValidationError: the component does not accept a value.
    """
    if not given:
        return _defaults(component.options, component.name)
    return component.options.model_validate({**given, "use": component.name})


@cache
def _defaults(options: type[Options], name: str) -> Options:
    return options.model_validate({"use": name})


def chosen_of(component: Component, options: Options) -> Chosen:
    """Return ``component`` as chosen with ``options``."""
    return Chosen(component.name, options, component.offers)
