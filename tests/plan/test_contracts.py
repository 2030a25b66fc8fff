"""Contracts: components of a former one are refused with the changes of their slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.api import (
    CONTRACT,
    AttentionOffers,
    Component,
    OutputOffers,
    PolicyOffers,
    QuantizationOffers,
)
from glowplug.core.plan.checks.contracts import CHANGES
from glowplug.core.plugin.slots import BY_NAME
from glowplug.core.testing.harness.fakes import component
from tests.plan.test_refusals import with_components

DOCS = Path(__file__).parents[2] / "docs/contracts.md"


def of(slot: str, offers: Any, contract: int | None) -> Component:
    return replace(component(slot, "former", offers), contract=contract)


@pytest.mark.parametrize("contract", [None, CONTRACT - 1])
@pytest.mark.parametrize(
    ("slot", "offers", "change"),
    [
        ("attention", AttentionOffers(kinds=frozenset({"mla"})), "KVContext"),
        ("quantization", QuantizationOffers(reads=frozenset({"none"})), "covers receives"),
    ],
)
def test_a_component_of_the_former_contract_is_refused_with_its_changes(
    refused, slot: str, offers: Any, change: str, contract: int | None
) -> None:
    """An installed distribution that states no contract was written for the first one."""
    own = with_components(**{slot: [of(slot, offers, contract)]})
    found = refused({slot: {"use": "former"}}, plugins=own)[f"{slot}.use"]
    assert f"written for contract {CONTRACT - 1}" in found.reason
    assert f"{change}" in found.fix and f"contract={CONTRACT}" in found.fix
    assert "extra-dist 2.1" in found.fix and "docs/contracts.md" in found.fix


def test_a_parser_of_the_former_contract_is_refused_with_its_changes(refused) -> None:
    own = with_components(outputs=[of("outputs", OutputOffers(), CONTRACT - 1)])
    found = refused({"outputs": [{"use": "former"}]}, plugins=own)["outputs.0.use"]
    assert "OutputRequest" in found.fix and f"contract={CONTRACT}" in found.fix


def test_a_component_of_an_unchanged_slot_goes_on(planned) -> None:
    own = with_components(policy=[of("policy", PolicyOffers(), CONTRACT - 1)])
    assert planned({"policy": {"use": "former"}}, plugins=own).choice("policy").name == "former"


def test_auto_passes_a_former_component_over(planned) -> None:
    kept = with_components(
        attention=[of("attention", AttentionOffers(kinds=frozenset({"mla"})), 1)]
    )
    assert planned(plugins=kept).choice("attention").name == "torch_mla"


def test_every_change_names_a_slot_and_is_documented() -> None:
    page = DOCS.read_text()
    for contract, changes in CHANGES.items():
        assert f"## Contract {contract}" in page and contract <= CONTRACT
        for slot in changes:
            assert slot in BY_NAME and f"### {slot}" in page
