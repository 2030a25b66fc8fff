"""The typed attributes of a proposal, whose classes are checked where plugins are registered, and
the trial of a slot's candidates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PluginLoadError, Refusal
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.checks.rules import instead
from glowplug.core.plan.checks.run import BY_SLOT, CHECKS, run_checks
from glowplug.core.plan.choose import choose
from glowplug.core.plan.chosen import AllOf, FirstOf
from glowplug.core.plan.inputs import read_inputs
from glowplug.core.plan.proposal import STEP_SLOTS, Proposal, Trial
from glowplug.core.plugin import offers
from glowplug.core.plugin.component import CheckContext, Component, Options
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.options import OPTION_BASES
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.slots import BY_NAME, SLOTS, Slot
from glowplug.core.testing.harness.fakes import component
from tests.plan.test_refusals import with_components


@pytest.fixture
def proposal(plugins: PluginSet, cpu: HardwareFacts, v3: Path) -> Proposal:
    """A proposal whose slots are all filled."""
    outputs = [{"use": "deepseek_r1"}]
    config = {"model": str(v3), "weights": {"use": "random"}, "outputs": outputs}
    inputs = read_inputs(config, plugins, cpu, {}, {})
    assert inputs.facts is not None and not inputs.refusals
    found = Proposal(plugins, inputs.parsed, inputs.facts, inputs.elements, inputs.draft_elements)
    choose(found)
    return found


def names(slots: Any) -> list[str]:
    return [slot.name for slot in slots]


# ---- attributes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", SLOTS, ids=names(SLOTS))
def test_each_slot_has_an_attribute_with_its_classes(slot: Slot) -> None:
    attribute = vars(Proposal)[slot.name]
    assert type(attribute) is (AllOf if slot.many else FirstOf) and attribute.slot == slot.name
    assert attribute.offers is getattr(offers, slot.offers)
    assert attribute.options is OPTION_BASES.get(slot.name, Options)


def test_an_attribute_is_what_was_chosen(proposal: Proposal) -> None:
    for slot in SLOTS:
        held = proposal.chosen[slot.name]
        found = getattr(proposal, slot.name)
        assert held and found == (held if slot.many else held[0])


def test_an_empty_slot_is_none_and_no_attribute_is_set(proposal: Proposal) -> None:
    proposal.chosen["attention"] = proposal.chosen["parallel"] = ()
    assert proposal.attention is None and proposal.parallel == ()
    with pytest.raises(AttributeError, match="attention is read-only"):
        proposal.attention = None  # type: ignore[misc]


def registered(slot: Slot, made: Component) -> None:
    """Register one component in a plugin set of its own."""

    def register(self: object) -> list[Component]:
        return [made]

    holder = type("Mine", (), {slot.hook: hookimpl(register, specname=slot.hook)})
    PluginSet([PluginSource("mine", "", "mine-dist", "1.0", loaded=holder())])


@pytest.mark.parametrize("slot", SLOTS, ids=names(SLOTS))
def test_other_offers_are_refused_where_a_plugin_is_registered(slot: Slot) -> None:
    wrong = offers.OutputOffers if slot.name == "model" else offers.ModelOffers
    registered(slot, component(slot.name, "mine", getattr(offers, slot.offers)()))
    with pytest.raises(PluginLoadError) as caught:
        registered(slot, component(slot.name, "mine", wrong()))
    said = f"{slot.hook}: 'mine' has offers of type {wrong.__name__}, expected {slot.offers}"
    assert said in str(caught.value) and "mine-dist 1.0" in str(caught.value)


@pytest.mark.parametrize("slot", [BY_NAME[name] for name in OPTION_BASES], ids=list(OPTION_BASES))
def test_other_options_are_refused_where_a_plugin_is_registered(slot: Slot) -> None:
    plain = component("model", "mine", getattr(offers, slot.offers)())
    with pytest.raises(PluginLoadError) as caught:
        registered(slot, plain)
    assert f"must be a subclass of {OPTION_BASES[slot.name].__name__}" in str(caught.value)


def test_a_check_reads_the_components_of_a_slot_by_their_offers(refused: Any) -> None:
    def check(context: CheckContext) -> Any:
        axes = [sorted(strategy.offers.axes) for strategy in context.of(offers.ParallelOffers)]
        caches = [cache.offers.shares for cache in context.of(offers.CacheOffers)]
        parsers = context.of(offers.OutputOffers)
        yield Refusal("strict", "policy.use", f"{axes} {caches} {parsers}", "another policy")

    own = component("policy", "strict", offers.PolicyOffers(), check=check)
    found = refused(
        {
            "policy": {"use": "strict"},
            "cache": {"use": "none"},
            "parallel": [{"use": "tensor", "size": 2}],
            "outputs": [],
        },
        plugins=with_components(policy=[own]),
    )
    assert found["policy.use"].reason == "[['tp']] [False] ()"


# ---- trials --------------------------------------------------------------------------------------


def test_a_trial_runs_the_checks_of_its_slot(
    proposal: Proposal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def recorded(name: str) -> Any:
        return lambda _: ran.append(name) or ()

    checks = {check: recorded(check.__name__) for check in CHECKS}
    monkeypatch.setattr("glowplug.core.plan.checks.run.CHECKS", tuple(checks.values()))
    by_slot = {slot: tuple(checks[check] for check in some) for slot, some in BY_SLOT.items()}
    monkeypatch.setattr("glowplug.core.plan.checks.run.BY_SLOT", by_slot)
    run_checks(proposal)
    assert ran == [check.__name__ for check in CHECKS] and len(ran) > 15
    ran.clear()
    proposal.trial = Trial("cache", fixes=False)
    run_checks(proposal)
    assert ran == ["check_prefix_policy", "check_tier"]


def test_a_trial_leaves_out_components_that_its_slot_does_not_affect(proposal: Proposal) -> None:
    def slots() -> list[str]:
        return list(dict.fromkeys(slot.name for slot, _ in proposal.step_path()))

    assert slots() == names(STEP_SLOTS)
    proposal.trial = Trial("ops", fixes=False)
    assert slots() == ["ops"]
    proposal.trial = Trial("graphs", fixes=False)
    assert slots() == names(STEP_SLOTS)


def test_only_a_trial_with_fixes_names_other_components(proposal: Proposal) -> None:
    def fix() -> str:
        return instead(proposal, "cache", lambda cache: cache.shares, "none")

    named = 'cache.use = "radix"'
    assert fix() == named
    proposal.trial = Trial("cache", fixes=False)
    assert fix() == "none"
    proposal.trial = Trial("cache", fixes=True)
    assert fix() == named


def test_no_trial_is_left_after_choosing(proposal: Proposal) -> None:
    assert proposal.trial is None
