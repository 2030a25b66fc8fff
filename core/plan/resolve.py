"""Planning: from a configuration to a frozen plan in six pure passes.

The passes are parse, facts, choose, check, size and freeze. They read no weights and import no
torch. All refusals are raised together, each with its reason and fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from glowplug.core.config.parse import Parsed
from glowplug.core.errors import ConfigError, GlowplugError, PlanRefused, Refusal
from glowplug.core.facts.mesh import divides
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.budget.sizes import size
from glowplug.core.plan.candidates import unfit
from glowplug.core.plan.checks.checkpoint import stacking
from glowplug.core.plan.checks.components import component_checks
from glowplug.core.plan.checks.ranks import out_of_order
from glowplug.core.plan.checks.run import run_checks
from glowplug.core.plan.choose import choose
from glowplug.core.plan.draft_model import draft_model_refusals, draft_slots
from glowplug.core.plan.freeze import freeze
from glowplug.core.plan.inputs import Inputs, read_inputs, remarks_on_facts
from glowplug.core.plan.plan import BudgetLine, Decision, EnginePlan, Sizes
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.loading import failure_in
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.plugin.slots import SLOTS


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
        PluginLoadError: the code of a third party's plugin raised another exception.
    """
    plugins = plugins if plugins is not None else load_plugins()
    try:
        return _plan(
            config,
            plugins,
            source=source,
            lines=lines,
            origins=origins,
            hardware=hardware,
            contributed=contributed,
            prior=prior,
            notes=notes,
            unused=unused,
        )
    except GlowplugError:
        raise
    except Exception as error:
        named = failure_in(plugins.sources, error, "plan")
        if named is None:
            raise
        raise named from error


def _plan(
    config: Mapping[str, Any],
    plugins: PluginSet,
    *,
    source: str,
    lines: Mapping[str, int] | None,
    origins: Mapping[str, str] | None,
    hardware: HardwareFacts | None,
    contributed: Mapping[str, Any] | None,
    prior: Sequence[Refusal],
    notes: Sequence[Decision],
    unused: Mapping[str, str],
) -> EnginePlan:
    """Make the plan; the arguments are those of ``plan``."""
    places = {path: f"{source}:{line}" for path, line in (lines or {}).items()}
    places |= origins or {}
    inputs = read_inputs(config, plugins, hardware, contributed or {}, places)
    proposal, sizes, budget = _accepted(plugins, inputs, prior, source)
    proposal.decisions[:0] = [*notes, *remarks_on_facts(proposal)]
    return freeze(proposal, sizes, budget, unused)


def _accepted(
    plugins: PluginSet, inputs: Inputs, prior: Sequence[Refusal], source: str
) -> tuple[Proposal, Sizes, tuple[BudgetLine, ...]]:
    """Return the proposal that passes three to five accept, its sizes and its budget.

    Raises:
        ConfigError, PlanRefused: see ``plan``.
    """
    proposal = _proposed(plugins, inputs)
    sized = size(proposal) if proposal is not None and _complete(proposal) else None
    refusals = list(dict.fromkeys([*prior, *_refusals(inputs, proposal)]))
    if prior or inputs.parsed.refusals:
        raise ConfigError(refusals, source)
    if refusals or proposal is None or sized is None:
        raise PlanRefused(refusals, source)
    return proposal, *sized


def _proposed(plugins: PluginSet, inputs: Inputs) -> Proposal | None:
    """Return the proposal after passes three (choose) and four (check); None without facts."""
    if inputs.facts is None:
        return None
    return _judged(
        Proposal(plugins, inputs.parsed, inputs.facts, inputs.elements, inputs.draft_elements)
    )


def _refusals(inputs: Inputs, proposal: Proposal | None) -> list[Refusal]:
    """Return the refusals of all passes."""
    if proposal is None:
        return [*inputs.refusals, *inputs.parsed.refusals]
    return [*_enriched(inputs.parsed, proposal), *inputs.refusals, *proposal.refusals]


def _enriched(parsed: Parsed, proposal: Proposal) -> list[Refusal]:
    """Return the refusals of parsing, with a longer reason for an unknown quantization.

    The longer reason also states if the checkpoint is already quantized.
    """
    name = parsed.unknown.get("quantization")
    if name is None or proposal.facts.model.quant_method == "none":
        return parsed.refusals
    scheme = proposal.quantization
    fix = "leave quantization out" + (
        f": {scheme.name} reads this checkpoint as it is" if scheme else ""
    )
    return [
        Refusal(r.by, r.field, f"{r.reason}; and {stacking(proposal, name)}", fix, r.origin)
        if r.field == "quantization.use"
        else r
        for r in parsed.refusals
    ]


def _judged(proposal: Proposal) -> Proposal:
    """Run passes three and four on ``proposal`` and return it.

    If the given device is refused, other refusals are kept only if they would also occur on
    another device. The rest only follow from the refused device.
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
            found += component_checks(proposal, slot, registration.component, chosen)
            if slot.name == "parallel" and out_of_order(proposal):
                continue  # its own check would refuse ranks that later strategies define
            found += unfit(proposal, slot, registration.component, chosen)
    found += draft_model_refusals(proposal)
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
    draft = proposal.draft
    return (
        filled
        and (draft is None or all(draft.chosen[name] for name in draft_slots(proposal)))
        and divides(proposal.values.mesh)
        and (proposal.values.device == "cpu" or bool(proposal.facts.hardware.devices))
    )
