"""Driven runs of the speculative suite; ``tests/mutants`` has faulty algorithms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits, SpeculativeAlgorithm
from glowplug.core.step.batch import Batch, idle_batch
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.scripted_drive import ScriptedDrive
from glowplug.core.testing.harness.scripted_target import PAGE
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from glowplug.plugins.speculative.ngram_runtime import NGram
from tests.contract.scripted_algorithms import (
    TREE,
    UnevenDrafts,
    nextn,
    ngram,
    on_a_device,
    standalone,
)

#: sizes of drafts in steps after which the plan's follow again; the first one drafts nothing
SMALLER = (DraftShape(), DraftShape.chain(1))


class OnADevice(SpeculativeSuite):
    def prepare(self, drive: ScriptedDrive) -> None:
        on_a_device(drive)


class TestNGram(SpeculativeSuite):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits)


class TestUnevenDrafts(SpeculativeSuite):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, UnevenDrafts)


class TestUnevenDraftsOnADevice(OnADevice):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, UnevenDrafts)


class TestUnevenTrees(SpeculativeSuite):
    shape = TREE

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, UnevenDrafts, topk=TREE.topk, draft_tokens=TREE.tokens)


class TestNGramOfOneStep(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, steps=1, prompt_lookup_min=2)


class TestNGramOnADevice(OnADevice):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits)


class TestNGramTree(SpeculativeSuite):
    shape = TREE
    sizes = (*SMALLER, DraftShape(2, 3, 5))

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, topk=TREE.topk, draft_tokens=TREE.tokens)


class TestNGramTreeOnADevice(OnADevice):
    shape = DraftShape(2, 4, 9)

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return ngram(limits, steps=2, topk=4, draft_tokens=9)


class TestNextN(SpeculativeSuite):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits)


class TestNextNOnADevice(OnADevice):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits)


class TestNextNTree(SpeculativeSuite):
    shape = DraftShape(3, 2, 5)
    sizes = (*SMALLER, DraftShape(2, 2, 4))

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits, topk=2, draft_tokens=5)


class TestNextNWideTree(SpeculativeSuite):
    shape = DraftShape(2, 4, 8)

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return nextn(limits, steps=2, topk=4, draft_tokens=8)


class TestStandalone(SpeculativeSuite):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return standalone(limits)


class TestStandaloneOfOneStep(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return standalone(limits, steps=1)


class TestStandaloneOnADevice(OnADevice):
    sizes = SMALLER

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return standalone(limits)


class TestStandaloneTree(SpeculativeSuite):
    shape = DraftShape(3, 2, 5)
    sizes = (*SMALLER, DraftShape(2, 2, 4))

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return standalone(limits, topk=2, draft_tokens=5)


class TestStandaloneWideTreeOnADevice(OnADevice):
    shape = DraftShape(2, 4, 8)

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        return standalone(limits, steps=2, topk=4, draft_tokens=8)


del OnADevice


def test_a_replayed_step_has_the_sequences_that_joined() -> None:
    """A scheduler may admit a sequence in a step that computes none of its tokens."""
    drafted: list[Batch] = []
    own, given = idle_batch(), idle_batch()
    given.joined = [sequence(1, [2, 3])]

    class Noting(NGram):
        def draft(self, batch: Batch) -> Tensor:
            drafted.append(batch)
            return super().draft(batch)

    graphs: Any = SimpleNamespace(
        graph_for=lambda batch: given, fill=lambda graph, batch: own, pass_for=lambda batch: None
    )
    drive = ScriptedDrive(
        ngram(Limits(9, 128, 129, 4, 23), Noting), bare_plan(width=4, page_size=PAGE)
    )
    drive.runner._complete(own)
    drive.runner.graphs = graphs
    drive.runner.launch(given).wait()
    assert drafted[0] is own and own.joined == given.joined
