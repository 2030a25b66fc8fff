"""Driven runs of the speculative suite: correct algorithms pass, each faulty one fails."""

from __future__ import annotations

import pytest

from glowplug.core.protocols import Limits, SpeculativeAlgorithm
from glowplug.core.testing.harness.scripted_drive import ScriptedDrive
from glowplug.core.testing.suites.speculative import DRIVES, SpeculativeSuite
from tests.contract.scripted_algorithms import (
    FAULTY,
    Maker,
    nextn,
    ngram,
    on_a_device,
)


class OnADevice(SpeculativeSuite):
    def prepare(self, drive: ScriptedDrive) -> None:
        on_a_device(drive)


class TestNGram(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits)


class TestNGramOfOneStep(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, steps=1, prompt_lookup_min=2)


class TestNGramOnADevice(OnADevice):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits)


class TestNextN(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits)


class TestNextNOnADevice(OnADevice):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits)


del OnADevice


class Faulty(SpeculativeSuite):
    def __init__(self, make: Maker) -> None:
        self._make = make

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return self._make(limits)


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_algorithm_is_caught(name: str) -> None:
    """A wrong length may also lead out of the page table."""
    suite = Faulty(FAULTY[name])
    with pytest.raises((AssertionError, IndexError)):
        for case in DRIVES:
            suite.test_answers_follow_the_script(case)
