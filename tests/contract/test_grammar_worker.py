"""The walk through a new grammar: what it follows, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest

from glowplug.core.engine.constraint import SequenceGrammar, allow_token
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Masks, Worker, words_of
from glowplug.core.startup.components import load_plugins_for
from glowplug.core.startup.grammars import grammar_builder
from glowplug.core.step.structured import GrammarSpec
from glowplug.entrypoints.front.grammar_worker import STEPS, compiler_of, walk
from tests.support.hostile_grammars import HOSTILE

VOCAB = 64
EOS = 1
SPEC = GrammarSpec("regex", "any")


class Script:
    """A compiled grammar and its matcher, which allow the same tokens in each step.

    Args:
        tokens: the tokens that are allowed.
        fails_at: number of accepted tokens after which the next mask fails; -1: none.
    """

    size = 1

    def __init__(self, tokens: Seq[int], fails_at: int = -1) -> None:
        self.accepted: list[int] = []
        self._tokens = tokens
        self._fails_at = fails_at

    def matcher(self) -> Script:
        return self

    def fill(self, mask: Masks) -> None:
        mask[:] = 0
        for token in self._tokens:
            allow_token(mask, token)

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return token in self._tokens

    def error(self) -> str:
        return "too complex" if len(self.accepted) == self._fails_at else ""


def walked(script: Any, times: Iterable[float] = ()) -> str:
    mask = np.zeros(words_of(VOCAB), np.int32)
    grammar = SequenceGrammar(script, SPEC, frozenset([EOS]))
    clock = chain(times, repeat(0.0))
    return walk(grammar, mask, clock.__next__)


def test_ends_of_a_grammar_that_can_go_on_are_not_followed() -> None:
    script = Script([EOS, 5, 9])
    assert walked(script) == ""
    assert len(script.accepted) == STEPS and set(script.accepted) == {5, 9}


def test_a_grammar_that_fails_behind_a_possible_end_is_refused() -> None:
    assert walked(Script([EOS, 5], fails_at=1)) == "too complex"


def test_a_grammar_that_can_only_end_is_good() -> None:
    script = Script([EOS])
    assert walked(script) == "" and script.accepted == []


def test_a_grammar_without_a_first_token_is_refused() -> None:
    assert "no first token" in walked(Script([]))


@pytest.mark.parametrize(("seconds", "refused"), [(0.05, False), (0.2, True)])
def test_a_grammar_with_a_slow_mask_is_refused(seconds: float, refused: bool) -> None:
    """The clock of the test gives each mask the same time, and the one after three tokens more."""
    times: list[float] = []
    for step in range(STEPS):
        begun = float(step)
        times += [begun, begun + (seconds if step == 3 else 0.001)]
    answer = walked(Script([5, 9]), times)
    assert answer == ("the tokens that may follow take 0.2 s to find after 3 tokens" * refused)


@pytest.fixture(scope="module")
def plan() -> EnginePlan:
    """A plan with the library that bounds the work of a mask."""
    pytest.importorskip("llguidance")
    config = {"model": "embedded", "grammar": {"use": "llguidance"}}
    return make_plan(config, plugins=load_plugins(entry_points=False))


def test_a_grammar_that_can_end_at_once_is_tried_further(plan: EnginePlan) -> None:
    """The first mask of the hostile one is quick and allows an end; the second one is not."""
    check = compiler_of(plan)
    kind, text = HOSTILE[9]
    assert text == "x*" * 5000
    assert "too many expressions" in check(GrammarSpec(kind, text))
    for good in ("x*", "(ab)?", "[a-z ]{0,400}"):
        assert check(GrammarSpec("regex", good)) == ""


def test_masks_behind_the_walk_are_limited_too(plan: EnginePlan) -> None:
    """The library would find this mask, but it takes more expressions than ``STEP_FUEL``."""
    builder = grammar_builder(plan, load_plugins_for(plan), Worker())
    grammar = builder.build(GrammarSpec("regex", f"A{{{2 * STEPS}}}" + "x*" * 300))
    mask = np.zeros(words_of(builder.vocab), np.int32)
    assert walk(grammar, mask) == ""
    matcher = grammar.compiled.matcher()
    matcher.fill(mask)
    (letter,) = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert all(matcher.accept(int(letter)) for _ in range(2 * STEPS)) and not matcher.error()
    matcher.fill(mask)
    assert "too many expressions" in matcher.error()
