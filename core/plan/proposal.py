"""A plan under construction: what the passes of ``resolve.py`` fill in and read. Plan zone: no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from glowplug.core.config.errors import place
from glowplug.core.config.schema import EngineConfig, Parsed
from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import Facts
from glowplug.core.facts.weight_classes import Tally
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Chosen, Component, Options
from glowplug.core.plugin.options import Section
from glowplug.core.plugin.slots import BY_NAME, SLOTS, Slot

if TYPE_CHECKING:
    from glowplug.core.plugin.registry import PluginSet

STEP_SLOTS = tuple(slot for slot in SLOTS if slot.step)
SHAPES_STEPS = frozenset(
    {"", "speculative", "graphs", "parallel"}
)  #: which modes run, and which are captured


@dataclass
class Draft:
    """Attributes:
    values: decided values that checks read: device, dtype, kv_dtype, width, lookahead,
        draft_layers, draft_folder, mesh, ranks, hosts, overlap, growing_segments, page_size.
    chosen: what each slot holds so far; every slot is a key.
    elements: numbers in the checkpoint by kind (``weight_classes.tally``).
    draft_elements: the same of the draft's own folder.
    picked: slots whose component was picked by the plan, so that device, dtype and packages are
    known to fit.
    focus: slot that is being chosen: the others' own place on the step's path need no second look.
    trying: a candidate is tried, and nobody reads how what refuses it could be mended.
    """

    plugins: PluginSet
    parsed: Parsed
    facts: Facts
    elements: Tally
    draft_elements: Tally = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, tuple[Chosen, ...]] = field(
        default_factory=lambda: {slot.name: () for slot in SLOTS}
    )
    focus: str = ""
    trying: bool = False
    picked: set[str] = field(default_factory=set)

    @property
    def config(self) -> EngineConfig:
        return self.parsed.config

    def decide(self, field: str, value: Any, by: str, why: str, notable: bool = False) -> None:
        self.decisions.append(Decision(field, value, by, why, notable))

    def written(self, path: str) -> bool:
        """Did the operator write this path?"""
        return path in self.parsed.operator

    def source(self, path: str) -> tuple[str, str] | None:
        """(by, why) of a value that was given: by the operator, or contributed. None: nobody gave
        it.
        """
        if path in self.parsed.operator:
            return "operator", place(path, self.parsed.origins) or "given"
        if path in self.parsed.origins:
            return self.parsed.origins[path], "contributed default"
        return None

    def first(self, slot: str) -> Chosen | None:
        held = self.chosen[slot]
        return held[0] if held else None

    def step_path(self) -> Iterable[tuple[Slot, Chosen]]:
        """Every component that takes part in a step; while a slot is being chosen, those its choice
        may upset.
        """
        slots = STEP_SLOTS if self.focus in SHAPES_STEPS else (BY_NAME[self.focus],)
        for slot in slots:
            for chosen in self.chosen[slot.name]:
                yield slot, chosen

    def origin(self, slot: str, name: str) -> str:
        """Distribution and version of a component, for refusals."""
        return self.plugins.source_of(slot, name).origin

    def context(self, options: Options | Section) -> CheckContext:
        return CheckContext(options, self.config, self.facts, self.chosen, self.values)


def options_of(component: Component, given: Mapping[str, Any] = MappingProxyType({})) -> Options:
    """The component's options with what was ``given``. pydantic's ValidationError for what it does
    not take.
    """
    if not given:
        return _defaults(component.options, component.name)
    return component.options.model_validate({**given, "use": component.name})


@cache
def _defaults(options: type[Options], name: str) -> Options:
    return options.model_validate({"use": name})


def chosen_of(component: Component, options: Options) -> Chosen:
    return Chosen(component.name, options, component.offers)
