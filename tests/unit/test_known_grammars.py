"""Grammars of a rank: a cached one is done at once, also while another one is being compiled."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.core.engine.grammar_builder import GrammarBuilder
from glowplug.core.engine.grammars import RankGrammars
from glowplug.core.step.structured import GrammarSpec

SPEC = GrammarSpec("regex", "a")
REASONED = SPEC.after_reasoning("<think>", "</think>", inside=False)
SLOW = GrammarSpec("regex", "slow")
MOST_PAUSES = 30_000  #: of 2 ms, until a grammar must be done


class Backend:
    """A library whose grammar ``SLOW`` is compiled once ``go`` is set."""

    def __init__(self) -> None:
        self.go = Event()
        self.compiled: list[str] = []

    def open(self, tokenizer: Any, vocab: int) -> None:
        pass

    def compile(self, spec: GrammarSpec) -> Any:
        if spec.text == SLOW.text:
            assert self.go.wait(60)
        self.compiled.append(spec.text)
        return SimpleNamespace(size=1)


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def builder(backend: Backend) -> GrammarBuilder:
    pieces = [b"<think>", b"</think>", b"a", b""]
    tokenizer: Any = SimpleNamespace(
        eos_ids=[3], vocab_size=len(pieces), token_bytes=lambda token: pieces[token]
    )
    library: Any = backend
    return GrammarBuilder(library, lambda: tokenizer, len(pieces), 100)


@pytest.fixture
def grammars(builder: GrammarBuilder) -> RankGrammars:
    return RankGrammars(builder)


def sequence(id: int, spec: GrammarSpec) -> Any:
    return SimpleNamespace(id=id, params=SimpleNamespace(grammar=spec), grammar=None)


def done(grammars: RankGrammars, *ids: int) -> None:
    """Wait for the grammars of the sequences ``ids``, and release these."""
    for _ in range(MOST_PAUSES):
        if [id for id, _ in grammars.ready()] == list(ids):
            break
        grammars.pause()
    else:
        raise AssertionError(f"the grammars of {ids} are not ready")
    for one, error in grammars.release([(id, "") for id in ids]):
        assert not error and one.grammar.spec == one.params.grammar


def test_a_cached_grammar_waits_for_no_other(grammars: RankGrammars, backend: Backend) -> None:
    grammars.hold(sequence(1, SPEC))
    done(grammars, 1)
    grammars.hold(sequence(2, SLOW))
    for id in (3, 4):
        grammars.hold(sequence(id, SPEC))
    assert grammars.ready() == [(3, ""), (4, "")]
    done(grammars, 3, 4)
    backend.go.set()
    done(grammars, 2)
    assert backend.compiled == ["a", "slow"] and not grammars.holds


def test_the_tags_of_a_reasoning_are_made_in_the_thread(
    grammars: RankGrammars, builder: GrammarBuilder
) -> None:
    grammars.hold(sequence(1, SPEC))
    done(grammars, 1)
    assert builder.known(SPEC) is not None and builder.known(REASONED) is None
    grammars.hold(sequence(2, REASONED))
    done(grammars, 2)
    grammars.hold(sequence(3, REASONED))
    assert grammars.ready() == [(3, "")]
    known = builder.known(REASONED)
    assert known is not None and known.tags is not None and known.tags.closing == b"</think>"
