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
from glowplug.core.plan.chosen import AllOf, FirstOf
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Chosen, ChosenOf, Component, Options
from glowplug.core.plugin.decided import Decided
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.offers import (
    AttentionOffers,
    CacheOffers,
    CollectiveOffers,
    ExecutorOffers,
    GrammarOffers,
    GraphOffers,
    ModelOffers,
    OpsOffers,
    OutputOffers,
    ParallelOffers,
    PolicyOffers,
    QuantizationOffers,
    SamplerOffers,
    SchedulerOffers,
    SpeculativeOffers,
    WeightOffers,
)
from glowplug.core.plugin.options import (
    AttentionOptions,
    CacheOptions,
    CollectivesOptions,
    ExecutorOptions,
    GraphOptions,
    OpsOptions,
    OutputOptions,
    ParallelOptions,
    PolicyOptions,
    QuantizationOptions,
    SamplingOptions,
    SchedulerOptions,
    Section,
    WeightOptions,
)
from glowplug.core.plugin.slots import BY_NAME, SLOTS, Slot
from glowplug.core.plugin.speculative_options import SpeculativeOptions

if TYPE_CHECKING:
    from glowplug.core.plugin.registry import PluginSet

STEP_SLOTS = tuple(slot for slot in SLOTS if slot.step)
#: slots whose choice decides which modes run and which are captured
SHAPES_STEPS = frozenset({"speculative", "graphs", "parallel"})


@dataclass(frozen=True)
class Trial:
    """The trial of a slot's candidates, during which only checks that read the slot run.

    Attributes:
        slot: name of the slot. Components of other slots are checked again only if the choice for
            this slot affects them.
        fixes: compute the fixes of refusals; False while only the first fitting candidate matters.
    """

    slot: str
    fixes: bool


@dataclass
class Proposal:
    """A plan under construction.

    Each slot has an attribute of its name: the first component chosen for it, or None; for
    ``parallel`` and ``outputs``, which hold several, a tuple.

    Attributes:
        plugins: the loaded plugins.
        parsed: the parsed configuration.
        facts: facts about model, hardware and software.
        elements: element counts of the checkpoint by kind (``weight_classes.Tally``).
        draft_elements: element counts of the draft model's own folder.
        refusals: refusals found so far.
        decisions: decisions made so far.
        values: decided values that checks and the byte budget read.
        chosen: components chosen so far by slot; every slot is a key.
        trial: the trial of candidates in progress; None outside of trials.
        draft: the proposal of a draft with attention of its own (``plan.draft_model``): a whole
            model, or an EAGLE head with another kind of attention; None if there is none.
        drafts: this is the proposal of such a draft, as its own model.
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
    trial: Trial | None = None
    draft: Proposal | None = None
    drafts: bool = False

    model = FirstOf(ModelOffers, Options)
    weights = FirstOf(WeightOffers, WeightOptions)
    attention = FirstOf(AttentionOffers, AttentionOptions)
    quantization = FirstOf(QuantizationOffers, QuantizationOptions)
    parallel = AllOf(ParallelOffers, ParallelOptions)
    collectives = FirstOf(CollectiveOffers, CollectivesOptions)
    speculative = FirstOf(SpeculativeOffers, SpeculativeOptions)
    scheduler = FirstOf(SchedulerOffers, SchedulerOptions)
    policy = FirstOf(PolicyOffers, PolicyOptions)
    graphs = FirstOf(GraphOffers, GraphOptions)
    cache = FirstOf(CacheOffers, CacheOptions)
    sampling = FirstOf(SamplerOffers, SamplingOptions)
    grammar = FirstOf(GrammarOffers, GrammarOptions)
    outputs = AllOf(OutputOffers, OutputOptions)
    executor = FirstOf(ExecutorOffers, ExecutorOptions)
    ops = FirstOf(OpsOffers, OpsOptions)

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
        """Return (by, why) of a value that the operator or a plugin gave; None for other values."""
        if path in self.parsed.operator:
            return "operator", place(path, self.parsed.origins) or "given"
        if path in self.parsed.origins:
            return self.parsed.origins[path], "contributed default"
        return None

    def given(self, path: str, value: Any) -> Decision:
        """Return a decision for ``value`` from the configuration, with its origin and reason."""
        by, why = self.source(path) or ("default", "")
        return Decision(path, value, by, why)

    @property
    def models(self) -> tuple[Proposal, ...]:
        """This proposal, and that of the draft if the draft has attention of its own."""
        return (self,) if self.draft is None else (self, self.draft)

    @property
    def whole_draft(self) -> Proposal | None:
        """The proposal of a draft that is a whole model; None if there is none."""
        return None if self.values.draft_extends else self.draft

    @property
    def exchanges(self) -> bool:
        """Ranks exchange tokens, so the number of tokens in a layer differs between steps."""
        if self.values.ranks == 1:
            return False
        given = ((chosen.offers.exchanges, chosen.options) for chosen in self.parallel)
        mesh = self.values.mesh
        return any(moves(options, mesh) if callable(moves) else moves for moves, options in given)

    @property
    def redundant_experts(self) -> int:
        """Number of copies of experts that each layer has beside its routed experts."""
        return sum(self.expert_copies)

    @property
    def expert_copies(self) -> tuple[int, ...]:
        """Number of copies of experts in each layer, of each strategy that places experts.

        The result is () if every rank holds consecutive experts.
        """
        offers = ((chosen.offers.expert_copies, chosen.options) for chosen in self.parallel)
        found = (copies(options) for copies, options in offers if copies is not None)
        return tuple(copies for copies in found if copies is not None)

    def step_path(self) -> Iterable[tuple[Slot, Chosen]]:
        """Yield the components that take part in a step, with their slots.

        During a trial, only components that are affected by the choice for the trial's slot are
        included.
        """
        slots = STEP_SLOTS
        if self.trial is not None and self.trial.slot not in SHAPES_STEPS:
            slots = (BY_NAME[self.trial.slot],)
        for slot in slots:
            for chosen in self.chosen[slot.name]:
                yield slot, chosen

    def origin(self, slot: str, name: str) -> str:
        """Return the distribution and version of a component's plugin, for refusals."""
        return self.plugins.source_of(slot, name).origin

    def context(self, options: Options | Section) -> CheckContext:
        """Return the context that the check of a component with these ``options`` receives."""
        return CheckContext(options, self.config, self.facts, self.chosen, self.values)


def given_options(section: Options) -> dict[str, Any]:
    """Return the values of a section that its configuration states, ``use`` excepted."""
    stated = section.model_fields_set - {"use"}
    return section.model_dump(mode="json", include=stated) if stated else {}


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
    # NOTE: calling the alias ``Chosen`` takes three times as long
    return ChosenOf(component.name, options, component.offers)
