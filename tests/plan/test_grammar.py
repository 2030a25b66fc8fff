"""The choice of the library for structured output."""

from __future__ import annotations

from typing import Any

from glowplug.core.facts.machine import read_sheet


def test_the_default_library_is_part_of_every_installation(planned: Any) -> None:
    assert planned({}).choice("grammar").name == "llguidance"
    assert planned({}, hardware=read_sheet("1xh200")).choice("grammar").name == "llguidance"


def test_a_library_that_is_missing_is_refused(refused: Any) -> None:
    found = refused({"grammar": {"use": "xgrammar"}}, hardware=read_sheet("cpu"))["grammar.use"]
    assert "needs xgrammar>=0.2.8 (not installed)" in found.reason
    assert "pip install" in found.fix


def test_limits_are_checked(refused: Any) -> None:
    found = refused({"grammar": {"compile_seconds": 0}})
    assert "greater than 0" in found["grammar.compile_seconds"].reason
