"""Planning: from a configuration to a frozen plan in six pure passes.

The passes are parse, facts, choose, check, size and freeze. They read no weights and import no
torch. All refusals are raised together, each with its reason and fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from glowplug.core.config.schema import (
    SECRETS,
    EngineConfig,
    Parsed,
    config_class,
    parse,
    recorded,
)
from glowplug.core.errors import (
    ConfigError,
    FactsError,
    PlanRefused,
    PluginLoadError,
    Refusal,
    WeightError,
)
from glowplug.core.facts.machine import this_machine
from glowplug.core.facts.mesh import divides
from glowplug.core.facts.model_facts import Facts, HardwareFacts
from glowplug.core.facts.model_folder import with_digest
from glowplug.core.plan.budget.sizes import size
from glowplug.core.plan.checks.components import component_checks, stacking
from glowplug.core.plan.checks.ranks import out_of_order
from glowplug.core.plan.checks.rules import run_checks
from glowplug.core.plan.choose import choose, unfit
from glowplug.core.plan.fingerprint import plan_fingerprint
from glowplug.core.plan.plan import BudgetLine, Choice, Decision, EnginePlan, Sizes
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import Chosen
from glowplug.core.plugin.model_reading import ModelReading
from glowplug.core.plugin.options import Section, SpeculativeOptions
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.plugin.slots import SLOTS, Slot


def plan(
    config: Mapping[str, Any],
    *,
    source: str = "the configuration",
    lines: Mapping[str, int] | None = None,
    origins: Mapping[str, str] | None = None,
    plugins: PluginSet | None = None,
    hardware: HardwareFacts | None = None,
    contributed: Mapping[str, Any] | None = None,
    prior: Sequence[Refusal] = (),
    notes: Sequence[Decision] = (),
    unused: Mapping[str, str] = MappingProxyType({}),
) -> EnginePlan:
    """Make the plan for a configuration.

    Args:
        config: nested dict with one key per section; see ``core/config/schema.py``.
        source: name of the configuration for messages ("engine.toml").
        lines: line number in ``source`` by dotted path.
        origins: origin of values by dotted path ("--tp 8"); takes precedence over ``lines``.
        plugins: loaded plugins; None to load them.
        hardware: facts of a sheet; None for this machine.
        contributed: the caller's own defaults by dotted path; the operator's values take
            precedence.
        prior: refusals found earlier (while the file was read), to be raised with the others.
        notes: decisions made earlier (flags without effect), to be recorded in the plan.
        unused: sections that the caller does not use, each with the reason.

    Raises:
        ConfigError: a part of the configuration could not be parsed.
        PlanRefused: the configuration cannot run. Both exceptions hold all refusals.
    """
    plugins = plugins if plugins is not None else load_plugins()
    places = {path: f"{source}:{line}" for path, line in (lines or {}).items()} | dict(
        origins or {}
    )
    refusals = list(prior)
    reading = _read_model(config.get("model", (contributed or {}).get("model")), plugins, refusals)
    facts = _with_template(
        _facts(reading, hardware, plugins), config.get("chat_template"), refusals
    )
    defaults = _contributions(plugins, facts, contributed or {})
    parsed = parse(config, plugins, config_class(plugins), defaults, places)
    if "chat_template" in defaults and "chat_template" not in config:
        facts = _with_template(facts, parsed.config.chat_template, refusals)
    if facts is None or reading is None:
        found = _unique([*refusals, *parsed.refusals])
        raise ConfigError(found, source) if prior or parsed.refusals else PlanRefused(found, source)
    if hardware is None:  # this machine is one of several equal hosts
        facts = replace(
            facts, hardware=replace(facts.hardware, hosts=parsed.config.executor.hosts or 1)
        )
    own = _read_draft(parsed, plugins, refusals)
    facts = replace(facts, draft=own.facts if own else None)
    proposal = _judged(
        Proposal(plugins, parsed, facts, reading.elements, own.elements if own else {})
    )
    proposal.decisions[:0] = [*notes, *_remarks(proposal)]
    proposal.refusals[:0] = refusals[len(prior) :]
    sized = size(proposal) if _complete(proposal) else None
    found = [*prior, *_enriched(parsed, proposal), *proposal.refusals]
    if prior or parsed.refusals:
        raise ConfigError(_unique(found), source)
    if found or sized is None:
        raise PlanRefused(_unique(found), source)
    return _freeze(proposal, *sized, unused)


# ---- facts ---------------------------------------------------------------------------------------


def _facts(
    reading: ModelReading | None, hardware: HardwareFacts | None, plugins: PluginSet
) -> Facts | None:
    """Return the facts of the model and of ``hardware``, with the packages installed there.

    If a sheet states packages, built-in components find no others. Two kinds of packages are taken
    from this environment if the sheet leaves them out: torch, which every installation has, and
    packages that only third-party plugins need, which are installed with these plugins.

    NOTE: another machine has its own build of torch, whose CUDA version is not known here.

    Args:
        hardware: facts of a sheet; None for this machine.
    """
    if reading is None:
        return None
    here = plugins.software
    packages = dict(here.packages)
    if hardware is not None and "torch" in packages:
        packages["torch"] = packages["torch"].partition("+cpu")[0]
    if hardware is not None and hardware.packages is not None:
        kept = {"torch", *plugins.third_party_packages}
        packages = {
            name: version for name, version in packages.items() if name in kept
        } | hardware.packages
        packages = {name: version for name, version in packages.items() if version}
    return Facts(reading.facts, hardware or this_machine(), replace(here, packages=packages))


def _with_template(facts: Facts | None, given: object, refusals: list[Refusal]) -> Facts | None:
    """Return ``facts`` with the chat template that was given instead of the model's.

    A template that cannot be read is added to ``refusals``.
    """
    if isinstance(given, PurePath):
        given = str(given)
    if facts is None or not isinstance(given, str) or not given:
        return facts
    from glowplug.core.text.chat_template import read_template

    try:
        return replace(facts, model=replace(facts.model, chat_template=read_template(given)))
    except FactsError as error:
        refusals.append(Refusal("facts", "chat_template", str(error), error.fix))
        return facts


def _read_model(name: object, plugins: PluginSet, refusals: list[Refusal]) -> ModelReading | None:
    """Return the facts of the model; None if none is given or it is added to ``refusals``."""
    if isinstance(name, PurePath):
        name = str(name)
    if not isinstance(name, str) or not name:
        return None
    try:
        return plugins.read_model(name)
    except FactsError as error:
        refusals.append(Refusal("facts", "model", str(error), error.fix or "another model folder"))
    except WeightError as error:
        refusals.append(
            Refusal("facts", "model", str(error), "download the files again, or another folder")
        )
    return None


def _read_draft(parsed: Parsed, plugins: PluginSet, refusals: list[Refusal]) -> ModelReading | None:
    """Return the facts of the draft model's own folder, or None if the options name no folder."""
    folder = (
        parsed.config.speculative.draft_folder()
        if isinstance(parsed.config.speculative, SpeculativeOptions)
        else None
    )
    if not folder:
        return None
    try:
        return plugins.read_model(folder)
    except (FactsError, WeightError) as error:
        fix = getattr(error, "fix", "") or "a draft folder that can be read"
        refusals.append(
            Refusal("facts", "speculative.draft_model", str(error), fix + ", or leave it out")
        )
    return None


def _contributions(
    plugins: PluginSet, facts: Facts | None, own: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Return (value, contributor) of contributed defaults by dotted path.

    Later plugins take precedence over earlier ones, and the caller's own defaults over all.
    """
    found: dict[str, tuple[Any, str]] = {}
    if facts is not None:
        for name, values in plugins.call_each("contribute_defaults", facts=facts):
            found |= {path: (value, name) for path, value in (values or {}).items()}
    return found | {path: (value, CALLER) for path, value in own.items()}


# ---- remarks and refusals ------------------------------------------------------------------------


def _remarks(proposal: Proposal) -> list[Decision]:
    """Return remarks on the facts: the checkpoint, packages of a sheet, the chat template."""
    model = proposal.facts.model
    remarks = [
        Decision("facts", note, "facts", "the checkpoint", notable=True) for note in model.notes
    ]
    if proposal.facts.hardware.packages is not None:
        remarks.append(
            _packages(proposal.facts.hardware.packages, proposal.facts.software.packages)
        )
    if proposal.config.chat_template is not None:
        remarks.append(_template_decision(proposal, proposal.config.chat_template))
    return remarks


def _packages(stated: Mapping[str, str], packages: Mapping[str, str]) -> Decision:
    """Return the remark that lists the packages of the sheet and those of this environment."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"{name} {packages[name]}" for name in sorted(names))

    here = listed(packages.keys() - stated.keys())
    why = listed(packages.keys() & stated.keys()) or "none"
    return Decision(
        "packages", "of the sheet", "facts", f"{why}; from here: {here}" if here else why
    )


def _template_decision(proposal: Proposal, given: str) -> Decision:
    from glowplug.core.text.chat_template import is_inline

    by, why = proposal.source("chat_template") or ("default", "")
    return Decision(
        "chat_template", "inline" if is_inline(given) else PurePath(given).name, by, why
    )


def _enriched(parsed: Parsed, proposal: Proposal) -> list[Refusal]:
    """Return the refusals of parsing.

    The refusal of an unknown quantization also states if the checkpoint is already quantized.
    """
    name = parsed.unknown.get("quantization")
    if name is None or proposal.facts.model.quant_method == "none":
        return parsed.refusals
    scheme = proposal.first("quantization")
    fix = "leave quantization out" + (
        f": {scheme.name} reads this checkpoint as it is" if scheme else ""
    )
    return [
        Refusal(r.by, r.field, f"{r.reason}; and {stacking(proposal, name)}", fix, r.origin)
        if r.field == "quantization.use"
        else r
        for r in parsed.refusals
    ]


def _unique(refusals: Sequence[Refusal]) -> list[Refusal]:
    return list(dict.fromkeys(refusals))


def _judged(proposal: Proposal) -> Proposal:
    """Run passes three and four on ``proposal`` and return it.

    If the given device is refused, refusals that would not occur on another device are only
    consequences and are dropped.
    """
    choose(proposal)
    _check(proposal)
    if proposal.config.device != "auto" and any(
        refusal.field == "device" for refusal in proposal.refusals
    ):
        parsed = replace(
            proposal.parsed, config=proposal.config.model_copy(update={"device": "auto"})
        )
        other = _judged(
            Proposal(
                proposal.plugins, parsed, proposal.facts, proposal.elements, proposal.draft_elements
            )
        )
        elsewhere = {(refusal.field, refusal.reason) for refusal in other.refusals}
        proposal.refusals = [
            refusal
            for refusal in proposal.refusals
            if refusal.field == "device" or (refusal.field, refusal.reason) in elsewhere
        ]
    return proposal


def _check(proposal: Proposal) -> None:
    """Run pass four: all generic checks, the components' own checks and the hook ``check_plan``."""
    found = list(run_checks(proposal))
    for slot in SLOTS:
        for chosen in proposal.chosen[slot.name]:
            registration = proposal.plugins.find(slot.name, chosen.name)
            assert registration is not None
            if slot.name not in proposal.picked:
                found += component_checks(proposal, slot, registration.component, chosen)
            if slot.name == "parallel" and out_of_order(proposal):
                continue  # its own check would refuse ranks that later strategies define
            found += unfit(proposal, slot, registration.component, chosen)
    for name, refusals in proposal.plugins.call_each(
        "check_plan", context=proposal.context(proposal.config.attention)
    ):
        found += [Refusal(r.by or name, r.field, r.reason, r.fix, r.origin) for r in refusals or ()]
    proposal.refusals += found


def _complete(proposal: Proposal) -> bool:
    """Return whether enough is decided to compute sizes."""
    filled = all(
        proposal.chosen[name]
        for name in ("model", "attention", "quantization", "speculative", "parallel")
    )
    return (
        filled
        and divides(proposal.values.mesh)
        and (proposal.values.device == "cpu" or bool(proposal.facts.hardware.devices))
    )


# ---- freeze --------------------------------------------------------------------------------------


def _freeze(
    proposal: Proposal, sizes: Sizes, budget: tuple[BudgetLine, ...], unused: Mapping[str, str]
) -> EnginePlan:
    """Return the frozen plan of an accepted proposal (pass six)."""
    config = proposal.config
    values = proposal.values
    plugins = proposal.plugins
    proposal.decide("seed", config.seed, *(proposal.source("seed") or ("default", "")))
    for _, remarks in plugins.call_each("plan_remarks", context=proposal.context(config.attention)):
        proposal.decisions += remarks or ()
    _record_options(proposal, unused)
    facts = proposal.facts
    beside = proposal.facts.draft
    facts = replace(
        facts,
        model=with_digest(facts.model),
        draft=with_digest(beside) if beside is not None else None,
    )
    plan = EnginePlan(
        model=config.model,
        dtype=values.dtype,
        kv_dtype=values.kv_dtype,
        device=values.device,
        seed=config.seed,
        overlap=values.overlap,
        choices=_choices(proposal),
        decisions=tuple(proposal.decisions),
        budget=budget,
        sizes=sizes,
        mesh=values.mesh,
        facts=facts,
        config=recorded(proposal.parsed.raw),
        plugins=plugins.names,
        plugin_fingerprint=plugins.fingerprint,
        hosts=values.hosts,
        sampled_last_layer=values.sampled_last_layer,
        growing_segments=values.growing_segments,
        chat_template=facts.model.chat_template if config.chat_template is not None else "",
    )
    return replace(plan, fingerprint=plan_fingerprint(plan))


def _choices(proposal: Proposal) -> tuple[Choice, ...]:
    """Return the chosen components of all slots."""
    choices = []
    for slot in SLOTS:
        for chosen in proposal.chosen[slot.name]:
            registration = proposal.plugins.find(slot.name, chosen.name)
            assert registration is not None
            choices.append(
                Choice(
                    slot.name,
                    chosen.name,
                    registration.component.factory,
                    chosen.options.model_dump(mode="json"),
                    registration.distribution,
                    registration.version,
                    tuple(chosen.options.marked("operational")),
                )
            )
    return tuple(choices)


def _record_options(proposal: Proposal, unused: Mapping[str, str]) -> None:
    """Record the operator's values that no pass decided, and mark given values as notable.

    The reason of a given value also states if it has no effect.
    """
    decided = {decision.field for decision in proposal.decisions}
    for path, value in proposal.parsed.operator.items():
        if isinstance(value, Mapping) or path in _LISTS or path in decided:
            continue
        shown = "***" if path in SECRETS and value is not None else value
        by, why = proposal.source(path) or ("operator", "")
        proposal.decide(path, list(shown) if isinstance(shown, tuple) else shown, by, why)
    idle = _without_effect(proposal)
    idle |= {
        path: unused[path.partition(".")[0]]
        for path in proposal.parsed.operator
        if path.partition(".")[0] in unused
    }
    proposal.decisions = [
        _as_given(decision, idle) if _given(proposal, decision) else decision
        for decision in proposal.decisions
    ]


def _given(proposal: Proposal, decision: Decision) -> bool:
    """Return whether the operator or a plugin gave a decision's field or its whole section."""
    sources = (proposal.source(path) for path in (decision.field, decision.field.partition(".")[0]))
    return decision.by != CALLER and any(
        source is not None and source[0] == decision.by for source in sources
    )


def _as_given(decision: Decision, idle: Mapping[str, str]) -> Decision:
    """Return a given decision as notable, with the reason why it has no effect, if any.

    Values that leave the choice to the plan (None, "auto") are never without effect.
    """
    why = idle.get(decision.field, "") if decision.value not in (None, "auto") else ""
    return replace(
        decision, why=f"{decision.why}; no effect: {why}" if why else decision.why, notable=True
    )


def _without_effect(proposal: Proposal) -> dict[str, str]:
    """Return the reasons why options change nothing in this plan, by dotted path."""
    found: dict[str, str] = {}
    for slot in SLOTS:
        for number, chosen in enumerate(proposal.chosen[slot.name]):
            prefix = f"{slot.section}.{number}" if slot.many else slot.section
            found |= {
                f"{prefix}.{name}": why for name, why in _stated(proposal, slot, chosen).items()
            }
    config = proposal.config
    for key in EngineConfig.model_fields:
        section = getattr(config, key)
        if isinstance(section, Section):
            stated = section.without_effect(proposal.context(section))
            found |= {f"{key}.{name}": why for name, why in stated.items()}
    return found | config.without_effect(proposal.context(config))


def _stated(proposal: Proposal, slot: Slot, chosen: Chosen) -> dict[str, str]:
    """Return a component's options without effect; raise PluginLoadError if its method fails."""
    try:
        return chosen.options.without_effect(proposal.context(chosen.options))
    except Exception as error:
        label = proposal.plugins.source_of(slot.name, chosen.name).label
        raise PluginLoadError(
            f"plugin {label}: without_effect of {slot.name} {chosen.name} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


CALLER = "entry point"  #: contributor of the defaults of a command or of ``LLM(...)``
_LISTS = frozenset(slot.section for slot in SLOTS if slot.many)
