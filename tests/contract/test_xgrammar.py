"""The library "xgrammar": forced tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgrammar")

from glowplug.core.protocols import Matcher, Worker, words_of
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.plugins.grammar.xgrammar_runtime import FORCED_TEXT

VOCAB = 2048


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(__file__).parents[2] / "models/embedded/checkpoint")


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> Any:
    found = make("grammar", "xgrammar", bare_plan(), Worker())
    found.open(tokenizer, VOCAB)
    return found


def mask_of(matcher: Matcher) -> list[int]:
    mask = np.zeros(words_of(VOCAB), np.int32)
    matcher.fill(mask)
    found: list[int] = mask.tolist()
    return found


def test_forced_tokens_are_the_text_up_to_a_choice(backend: Any, tokenizer: Tokenizer) -> None:
    matcher = backend.compile(GrammarSpec("regex", "[pq] is a word, and é [xy]")).matcher()
    assert not matcher.forced(), "the first letter is a choice"
    assert matcher.accept(tokenizer.encode("p", False)[0])
    before = mask_of(matcher)
    forced = list(matcher.forced())
    assert tokenizer.decode(forced) == " is a word, and é "
    assert mask_of(matcher) == before, "the state has not changed"
    assert all(matcher.accept(token) for token in forced) and not matcher.forced()
    matcher.rollback(len(forced))
    assert list(matcher.forced()) == forced


def test_forced_bytes_that_are_no_text_are_not_offered(backend: Any, tokenizer: Tokenizer) -> None:
    matcher = backend.compile(GrammarSpec("regex", "[éè]x")).matcher()
    assert not matcher.forced(), "both letters have the same first byte"
    first = next(i for i in range(VOCAB) if tokenizer.token_bytes(i) == "é".encode()[:1])
    assert matcher.accept(first) and not matcher.forced()


def test_long_forced_texts_are_cut(backend: Any, tokenizer: Tokenizer) -> None:
    matcher = backend.compile(GrammarSpec("regex", "a{2000}")).matcher()
    assert tokenizer.decode(list(matcher.forced())) == "a" * FORCED_TEXT
