"""Driven runs of the speculative suite: correct algorithms pass, each faulty one fails."""

from __future__ import annotations

import pytest

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits, SpeculativeAlgorithm
from glowplug.core.testing.harness.scripted_drive import ScriptedDrive
from glowplug.core.testing.suites.speculative import DRIVES, SpeculativeSuite
from tests.contract.scripted_algorithms import (
    FAULTY,
    TREE,
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


class TestNGramTree(SpeculativeSuite):
    shape = TREE

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, topk=TREE.topk, draft_tokens=TREE.tokens)


class TestNGramTreeOnADevice(OnADevice):
    shape = DraftShape(2, 4, 9)

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, steps=2, topk=4, draft_tokens=9)


class TestNextN(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits)


class TestNextNOnADevice(OnADevice):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits)


class TestNextNTree(SpeculativeSuite):
    shape = DraftShape(3, 2, 5)

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits, topk=2, draft_tokens=5)


class TestNextNWideTree(SpeculativeSuite):
    shape = DraftShape(2, 4, 8)

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits, steps=2, topk=4, draft_tokens=8)


del OnADevice


class Faulty(SpeculativeSuite):
    shape = TREE  # the pages of a chain are among those of a tree

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
