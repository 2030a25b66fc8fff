"""Pass six: the frozen plan of an accepted proposal. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from glowplug.core.config.schema import SECRETS, EngineConfig, recorded
from glowplug.core.facts.model_facts import Facts
from glowplug.core.facts.model_folder import with_digest
from glowplug.core.plan.checks.adaptive import given_costs
from glowplug.core.plan.checks.speculation import other_source
from glowplug.core.plan.draft_model import draft_slots
from glowplug.core.plan.fingerprint import plan_fingerprint
from glowplug.core.plan.inputs import CALLER
from glowplug.core.plan.kv_entries import planned_entries
from glowplug.core.plan.plan import BudgetLine, Choice, Decision, EnginePlan, Sizes
from glowplug.core.plan.proposal import Proposal, options_of
from glowplug.core.plugin.component import Chosen, Options
from glowplug.core.plugin.loading import Registration, describe, failed
from glowplug.core.plugin.offers import PolicyOffers
from glowplug.core.plugin.options import Section
from glowplug.core.plugin.slots import SLOTS, Slot

_LISTS = frozenset(slot.section for slot in SLOTS if slot.many)


def freeze(
    proposal: Proposal, sizes: Sizes, budget: tuple[BudgetLine, ...], unused: Mapping[str, str]
) -> EnginePlan:
    """Return the frozen plan of an accepted proposal.

    Args:
        budget: the lines of the byte budget.
        unused: sections that the caller does not use, each with the reason.
    """
    proposal.decisions.append(proposal.given("seed", proposal.config.seed))
    context = proposal.context(proposal.config.attention)
    for _, remarks in proposal.plugins.call_each("plan_remarks", context=context):
        proposal.decisions += remarks or ()
    _record_options(proposal, unused)
    plan = _engine_plan(proposal, sizes, budget)
    return replace(plan, fingerprint=plan_fingerprint(plan))


def _engine_plan(proposal: Proposal, sizes: Sizes, budget: tuple[BudgetLine, ...]) -> EnginePlan:
    """Return the plan without its fingerprint."""
    config = proposal.config
    values = proposal.values
    plugins = proposal.plugins
    facts = _with_digests(proposal.facts)
    return EnginePlan(
        model=config.model,
        dtype=values.dtype,
        kv_dtype=values.kv_dtype,
        device=values.device,
        seed=config.seed,
        overlap=values.overlap,
        choices=_choices(proposal, (slot.name for slot in SLOTS)),
        draft_choices=_choices(proposal.draft, draft_slots(proposal)) if proposal.draft else (),
        draft_source=_draft_source(proposal),
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
        expandable_segments=values.expandable_segments,
        draft_costs=given_costs(proposal),
        request_fields=_request_fields(proposal),
        kv_entries=planned_entries(proposal),
        draft_kv_entries=planned_entries(proposal.draft) if proposal.draft else (),
        chat_template=facts.model.chat_template if config.chat_template is not None else "",
    )


def _request_fields(proposal: Proposal) -> str:
    """Return the path of the model of the fields that the policy reads from requests."""
    for chosen in proposal.chosen["policy"]:
        if isinstance(chosen.offers, PolicyOffers):
            return chosen.offers.request_fields
    return ""


def _with_digests(facts: Facts) -> Facts:
    """Return ``facts`` with the digests of the model's and the draft's files."""
    draft = with_digest(facts.draft) if facts.draft is not None else None
    return replace(facts, model=with_digest(facts.model), draft=draft)


def _choices(proposal: Proposal, slots: Iterable[str]) -> tuple[Choice, ...]:
    """Return the chosen components of the slots with these names."""
    choices = []
    for slot in slots:
        for chosen in proposal.chosen[slot]:
            registration = proposal.plugins.find(slot, chosen.name)
            assert registration is not None
            choices.append(_choice(slot, registration, chosen.options))
    return tuple(choices)


def _choice(slot: str, registration: Registration, options: Options) -> Choice:
    """Return the choice of a component with these options."""
    return Choice(
        slot,
        registration.component.name,
        registration.component.factory,
        options.model_dump(mode="json"),
        registration.distribution,
        registration.version,
        tuple(options.marked("operational")),
    )


def _draft_source(proposal: Proposal) -> Choice | None:
    """Return the weight source of the draft's folder; None if it is the model's."""
    found = other_source(proposal)
    return found and _choice("weights", found, options_of(found.component))


def _record_options(proposal: Proposal, unused: Mapping[str, str]) -> None:
    """Record decisions for given values that no pass decided; mark given values as notable.

    If a given value has no effect, the reason of its decision states so.
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
    """Return whether the operator or a plugin gave a decision's value or its whole section."""
    sources = (proposal.source(path) for path in (decision.field, decision.field.partition(".")[0]))
    return decision.by != CALLER and any(
        source is not None and source[0] == decision.by for source in sources
    )


def _as_given(decision: Decision, idle: Mapping[str, str]) -> Decision:
    """Return the decision for a given value as notable.

    If the value has no effect, the reason states so. Values that leave the choice to the plan
    (None, "auto") always count as having an effect.

    Args:
        idle: reason by field, for options without effect.
    """
    why = idle.get(decision.field, "") if decision.value not in (None, "auto") else ""
    return replace(
        decision, why=f"{decision.why}; no effect: {why}" if why else decision.why, notable=True
    )


def _without_effect(proposal: Proposal) -> dict[str, str]:
    """Return the options that change nothing in this plan: dotted path -> reason."""
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
    """Return the options of a component that change nothing in this plan: name -> reason.

    Raises:
        PluginLoadError: the options' method ``without_effect`` failed.
    """
    try:
        return chosen.options.without_effect(proposal.context(chosen.options))
    except Exception as error:
        source = proposal.plugins.source_of(slot.name, chosen.name)
        reason = f"without_effect of {slot.name} {chosen.name!r} failed: {describe(error)}"
        raise failed(source, reason, "plan") from error
