"""The choice of the library for structured output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts

TORCH = {"torch": "2.13.0+cpu"}


def machine(**packages: str) -> HardwareFacts:
    """Return a CPU on which only torch and ``packages`` are installed."""
    return replace(read_sheet("cpu"), packages={**TORCH, **packages})


def test_the_default_library_is_part_of_every_installation(planned: Any) -> None:
    assert planned({}).choice("grammar").name == "llguidance"
    assert planned({}, hardware=read_sheet("1xh200")).choice("grammar").name == "llguidance"


def test_the_library_that_is_installed_is_chosen(planned: Any) -> None:
    both = machine(llguidance="1.9.1", xgrammar="0.2.8")
    assert planned({}, hardware=both).choice("grammar").name == "llguidance"
    for other in (machine(xgrammar="0.2.8"), machine(xgrammar="0.2.8", llguidance="1.6.0")):
        assert planned({}, hardware=other).choice("grammar").name == "xgrammar"


def test_a_plan_without_a_library_states_what_is_missing(planned: Any) -> None:
    plan = planned({}, hardware=machine())
    assert plan.choice("grammar").name == "none"
    why = next(one.why for one in plan.decisions if one.field == "grammar.use")
    assert "llguidance>=1.7 (not installed)" in why and "xgrammar>=0.2.8" in why


def test_a_library_that_is_missing_is_refused(refused: Any) -> None:
    for name, needed in (("llguidance", "llguidance>=1.7"), ("xgrammar", "xgrammar>=0.2.8")):
        found = refused({"grammar": {"use": name}}, hardware=machine())["grammar.use"]
        assert f"needs {needed} (not installed)" in found.reason
        assert f'pip install "{needed}"' in found.fix


def test_limits_are_checked(refused: Any) -> None:
    found = refused({"grammar": {"compile_seconds": 0}})
    assert "greater than 0" in found["grammar.compile_seconds"].reason
