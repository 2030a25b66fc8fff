"""Faults planted in speculative algorithms, which the driven runs of the suite catch."""

from __future__ import annotations

from typing import Any

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from tests.contract.scripted_algorithms import (
    FAULTY,
    FAULTY_IN_SIZES,
    TREE,
    Maker,
    ngram,
)
from tests.mutants.framework import Mutant

#: sizes of drafts in steps after which the plan's follow again; the first one drafts nothing
SMALLER = (DraftShape(), DraftShape.chain(1))


class Drafts(SpeculativeSuite):
    shape = TREE  # the pages of a chain are among those of a tree

    def make(self, limits: Limits) -> Any:
        return ngram(limits)


class DraftsOfSizes(SpeculativeSuite):
    sizes = SMALLER

    def make(self, limits: Limits) -> Any:
        return ngram(limits)


def planted(name: str, maker: Maker, correct: type, by: str) -> Mutant:
    """Return the mutant that ``maker`` makes."""
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()
    kind = type("Planted", (correct,), {"make": lambda suite, limits: maker(limits)})
    return Mutant("speculative", words, by, correct, kind)


MUTANTS = [
    *(planted(n, m, Drafts, "test_answers_follow_the_script") for n, m in FAULTY.items()),
    *(
        planted(n, m, DraftsOfSizes, "test_drafts_may_change_their_size")
        for n, m in FAULTY_IN_SIZES.items()
    ),
]
