"""Choice of the components of a draft with attention of its own. Plan zone: no torch.

Such a draft is a whole model, or an EAGLE head with another kind of attention than its target's. It
runs with the target's mesh, collectives, compute dtype, page size and speculative algorithm. Model
family, attention and, for a whole model, quantization are chosen for it by the rules and checks
that choose those of the target. Its KV cache has the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glowplug.core.config.parse import Parsed
from glowplug.core.config.schema import auto_options
from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.budget.counts import decide_page_size
from glowplug.core.plan.candidates import against, own_check, pick, unfit
from glowplug.core.plan.checks.components import component_checks
from glowplug.core.plan.checks.draft_models import AXES
from glowplug.core.plan.checks.run import run_checks
from glowplug.core.plan.checks.speculation import FOLDER, HEADS, other_source
from glowplug.core.plan.kv_entries import own_cache_family
from glowplug.core.plan.proposal import Proposal, Trial, chosen_of, options_of
from glowplug.core.plugin.decided import Decided
from glowplug.core.plugin.offers import AttentionOffers, ModelOffers
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.plugin.slots import BY_NAME

#: slots with a component for an EAGLE head; components in other slots are the target's
HEAD_SLOTS = ("model", "attention")
#: the same slots for a whole model; heads are loaded unquantised
MODEL_SLOTS = (*HEAD_SLOTS, "quantization")


def draft_slots(proposal: Proposal) -> tuple[str, ...]:
    """Return the slots with a component for the draft of ``proposal``."""
    return HEAD_SLOTS if proposal.values.draft_extends else MODEL_SLOTS


def choose_draft_source(proposal: Proposal) -> None:
    """Decide on the weight source of the draft's folder, if the model's cannot read it."""
    found = other_source(proposal)
    if found is not None:
        assert proposal.weights is not None and proposal.facts.draft is not None
        why = f"{proposal.weights.name} does not read {proposal.facts.draft.format} weights"
        proposal.decide("draft.weights.use", found.component.name, "auto", why)


def choose_draft_model(proposal: Proposal) -> None:
    """Set ``proposal.draft`` to the proposal of the draft, if it has attention of its own.

    Nothing is set if the draft's folder could not be read, if no family builds a draft of its
    architecture, or if the target has no attention; checks refuse these cases.
    """
    facts = proposal.facts.draft
    if facts is None or proposal.attention is None:
        return
    family = _draft_family(proposal, facts)
    if family is None:
        return
    draft = _draft_proposal(proposal, facts)
    found = proposal.plugins.find("model", family)
    assert found is not None
    draft.chosen["model"] = (chosen_of(found.component, options_of(found.component)),)
    _choose_attention(draft)
    if "quantization" in draft_slots(proposal):
        pick(draft, BY_NAME["quantization"])
    proposal.draft = draft
    architecture = facts.architecture
    proposal.decide("draft.family", family, "facts", f"config.json states {architecture}")
    for decision in draft.decisions:
        proposal.decisions.append(replace(decision, field=f"draft.{decision.field}"))
    if proposal.values.ranks > 1 and proposal.whole_draft is not None:
        why = f"each layer is split over {proposal.values.ranks} ranks, as the model's are"
        proposal.decide("draft.parallel", "split", "auto", why)


def _draft_family(proposal: Proposal, facts: ModelFacts) -> str | None:
    """Return the name of the family of a draft with attention of its own; None for other drafts."""
    speculative = proposal.speculative
    if speculative is not None and speculative.offers.whole_model:
        return family_of(proposal, facts)
    return own_cache_family(proposal)


def family_of(proposal: Proposal, facts: ModelFacts) -> str | None:
    """Return the name of the first family that builds models of the architecture of ``facts``."""
    for found in proposal.plugins.components("model"):
        offers = found.component.offers
        if isinstance(offers, ModelOffers) and facts.architecture in offers.architectures:
            return found.component.name
    return None


def _draft_proposal(proposal: Proposal, facts: ModelFacts) -> Proposal:
    """Return the proposal of the draft with these ``facts``, with the target's decided values."""
    values = {**vars(proposal.values), "kv_dtype": proposal.values.dtype, "draft_folder": None}
    return Proposal(
        proposal.plugins,
        _draft_configuration(proposal, facts),
        replace(proposal.facts, model=facts, draft=None),
        proposal.draft_elements,
        values=Decided(**values),
        chosen={**proposal.chosen, **dict.fromkeys(draft_slots(proposal), ())},
        drafts=True,
    )


def _draft_configuration(proposal: Proposal, facts: ModelFacts) -> Parsed:
    """Return the target's configuration with the draft's sections and the decided context."""
    parsed = proposal.parsed
    longest = parsed.config.context_length or proposal.facts.model.max_positions
    sections = {
        "attention": _attention_section(proposal, facts),
        "quantization": auto_options(BY_NAME["quantization"]).model_validate({"use": "auto"}),
    }
    return replace(
        parsed,
        config=parsed.config.model_copy(update={**sections, "context_length": longest}),
        origins=_without(parsed.origins, sections),
        operator=_without(parsed.operator, sections),
    )


def _without(values: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` by dotted path without those in ``sections``."""
    return {path: value for path, value in values.items() if path.split(".")[0] not in sections}


def _attention_section(proposal: Proposal, facts: ModelFacts) -> AttentionOptions:
    """Return the draft's section ``attention``: the target's, if it names a backend that fits."""
    given = proposal.config.attention
    attention = proposal.attention
    assert attention is not None
    page_size = decide_page_size(proposal).value
    dtype = proposal.values.dtype
    if given.use != "auto" and facts.kind in attention.offers.kinds:
        return given.model_copy(update={"page_size": page_size, "kv_dtype": dtype})
    return _automatic(page_size, dtype)


def _choose_attention(draft: Proposal) -> None:
    """Choose the draft's attention: the backend that its section names if it fits, else another."""
    slot = BY_NAME["attention"]
    given = draft.config.attention
    if given.use != "auto":
        found = draft.plugins.find("attention", given.use)
        assert found is not None and isinstance(found.component.offers, AttentionOffers)
        chosen = chosen_of(found.component, given)
        draft.chosen["attention"] = (chosen,)
        draft.trial = Trial("attention", fixes=False)
        refusal = against(draft, slot, found.component, chosen)
        draft.trial = None
        if refusal is None:
            draft.decide("attention.use", given.use, "operator", "the backend of the model")
            return
        section = _automatic(given.page_size, draft.values.dtype)
        config = draft.config.model_copy(update={"attention": section})
        draft.parsed = replace(draft.parsed, config=config)
    pick(draft, slot)


def _automatic(page_size: int | None, dtype: str) -> AttentionOptions:
    """Return a section ``attention`` that leaves the backend to the plan."""
    named = {"use": "auto", "page_size": page_size, "kv_dtype": dtype}
    made = auto_options(BY_NAME["attention"]).model_validate(named)
    assert isinstance(made, AttentionOptions)
    return made


def draft_model_refusals(proposal: Proposal) -> list[Refusal]:
    """Return the refusals of all checks on ``proposal.draft``, if there is one.

    Their field is the option with the draft's folder, except for those of tensor parallelism.
    """
    draft = proposal.draft
    if draft is None:
        return []
    found = list(draft.refusals)
    for name in draft_slots(proposal):
        draft.trial = Trial(name, fixes=False)
        found += run_checks(draft)
        for chosen in draft.chosen[name]:
            registration = draft.plugins.find(name, chosen.name)
            assert registration is not None
            found += component_checks(draft, BY_NAME[name], registration.component, chosen)
            found += unfit(draft, BY_NAME[name], registration.component, chosen)
    draft.trial = None
    fix = _another(proposal)
    found = [Refusal(one.by, FOLDER, one.reason, fix, one.origin) for one in found]
    if proposal.whole_draft is not None:  # ranks that cannot split a head are refused elsewhere
        found += _split_refusals(draft)
    reason = f"the draft model {draft.facts.model.path} cannot run: "
    return [replace(one, reason=reason + one.reason) for one in dict.fromkeys(found)]


def _another(proposal: Proposal) -> str:
    """Return the fix for a draft with attention of its own that cannot run."""
    what = HEADS if proposal.whole_draft is None else "another draft model"
    return f'{what}, or speculative.use = "none"'


def _split_refusals(draft: Proposal) -> list[Refusal]:
    """Return the refusals of ranks that cannot split the draft's layers."""
    found: list[Refusal] = []
    for chosen in draft.parallel:
        registration = draft.plugins.find("parallel", chosen.name)
        if registration is not None and chosen.offers.axes <= AXES:
            found += own_check(draft, BY_NAME["parallel"], registration.component, chosen)
    return found
