"""Every library of grammars: what it compiles, and that its matchers keep the protocol."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug.core.errors import RequestError
from glowplug.core.protocols import GrammarBackend, Matcher, Worker, words_of
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.text.tokenizer import Tokenizer

VOCAB = 2048
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 3, "maximum": 50},
        "w": {"enum": ["x", "yy"]},
    },
    "required": ["n", "w"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(__file__).parents[2] / "models/embedded/checkpoint")


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> GrammarBackend:
    pytest.importorskip(request.param)
    found: GrammarBackend = make("grammar", request.param, bare_plan(), Worker())
    found.open(tokenizer, VOCAB)
    return found


def allowed(matcher: Matcher) -> list[int]:
    mask = np.zeros(words_of(VOCAB), np.int32)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8), bitorder="little")
    ).tolist()
    return found


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 200) -> str | None:
    """Return a random text of the grammar; None if it does not end within ``most`` tokens."""
    dice = random.Random(seed)
    tokens: list[int] = []
    for _ in range(most):
        choices = allowed(matcher)
        assert choices and not matcher.error()
        ends = [token for token in choices if token in tokenizer.eos_ids]
        assert bool(ends) == matcher.complete()
        if ends and (len(ends) == len(choices) or dice.random() < 0.5):
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(dice.choice([token for token in choices if token not in ends]))
        assert matcher.accept(tokens[-1])
    return None


def is_schema(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"n", "w"} and 3 <= found["n"] <= 50 and found["w"] in ("x", "yy")


KINDS: list[tuple[GrammarSpec, Any]] = [
    (GrammarSpec("json_schema", json.dumps(SCHEMA)), is_schema),
    (GrammarSpec("json_schema", json.dumps(SCHEMA), whitespace=False), is_schema),
    (GrammarSpec("regex", "[ab]{3}c{1,4}|é"), lambda text: re.fullmatch("[ab]{3}c{1,4}|é", text)),
    (GrammarSpec("choice", '["é/\\"q", "no", "\\n"]'), lambda text: text in ('é/"q', "no", "\n")),
    (GrammarSpec("grammar", 'root ::= "a" [0-9]'), lambda text: re.fullmatch("a[0-9]", text)),
    (GrammarSpec("grammar", 'start: "a" /[0-9]/'), lambda text: re.fullmatch("a[0-9]", text)),
]


@pytest.mark.parametrize(("spec", "holds"), KINDS, ids=lambda v: "" if callable(v) else str(v)[:40])
def test_every_text_of_a_grammar_is_in_it(
    backend: GrammarBackend, tokenizer: Tokenizer, spec: GrammarSpec, holds: Any
) -> None:
    compiled = backend.compile(spec)
    assert compiled.size > 0
    texts = [walk(compiled.matcher(), tokenizer, seed) for seed in range(8)]
    ended = [text for text in texts if text is not None]
    assert ended and all(holds(text) for text in ended)


def test_a_structural_tag_constrains_what_follows_its_trigger(
    backend: GrammarBackend, tokenizer: Tokenizer
) -> None:
    matcher = backend.compile(GrammarSpec("structural_tag", json.dumps(TAG))).matcher()
    for token in tokenizer.encode("so <f", add_special_tokens=False):
        assert matcher.accept(token)
    free = tokenizer.encode("zebra", add_special_tokens=False)[0]
    assert free not in allowed(matcher)
    inside = '=a>{"n":7,"w":"x"}</f>'
    assert all(matcher.accept(token) for token in tokenizer.encode(inside, False))
    assert free in allowed(matcher)


def test_tokens_taken_back_leave_no_trace(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    compiled = backend.compile(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    matcher = compiled.matcher()
    other = compiled.matcher()
    dice = random.Random(3)
    masks = [allowed(matcher)]
    for token in tokenizer.encode('{"n": 12, "w"', add_special_tokens=False):
        assert matcher.accept(token)
        masks.append(allowed(matcher))
    at = len(masks) - 1
    while at:
        count = dice.randint(1, at)
        matcher.rollback(count)
        at -= count
        assert allowed(matcher) == masks[at]
    assert allowed(other) == masks[0], "matchers of one grammar are independent"


def test_many_masks_are_filled_at_once(backend: GrammarBackend) -> None:
    specs = [spec for spec, _ in KINDS]
    matchers = [backend.compile(spec).matcher() for spec in specs]
    masks = np.zeros((len(specs) + 1, words_of(VOCAB)), np.int32)
    backend.fill([(matcher, row + 1) for row, matcher in enumerate(matchers)], masks)
    for row, matcher in enumerate(matchers):
        alone = np.zeros(words_of(VOCAB), np.int32)
        matcher.fill(alone)
        assert np.array_equal(masks[row + 1], alone)
    assert not masks[0].any()


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(a"),
        GrammarSpec("json_schema", '{"type":"foo"}'),
        GrammarSpec("grammar", "root ::= missing"),
        GrammarSpec("structural_tag", '{"structures":[{"begin":"<x"}],"triggers":["<y"]}'),
    ],
)
def test_an_invalid_grammar_is_refused(backend: GrammarBackend, spec: GrammarSpec) -> None:
    with pytest.raises(RequestError, match="not supported|no trigger"):
        backend.compile(spec)


def test_an_environment_without_the_library_refuses_grammars_only(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without: GrammarBackend = make("grammar", "llguidance", bare_plan(), Worker())
    with pytest.raises(RequestError, match="needs llguidance"):
        without.open(tokenizer, VOCAB)
