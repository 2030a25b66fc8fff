"""Grammars as requests state them, and the constraint of one sequence."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from glowplug.core.engine.constraint import (
    Constraint,
    SequenceGrammar,
    TagTokens,
    allow_token,
    forbid_token,
    is_allowed,
)
from glowplug.core.engine.grammar_builder import GrammarCache
from glowplug.core.errors import RequestError
from glowplug.core.protocols import Masks, words_of
from glowplug.core.step.request import SamplingParams
from glowplug.core.step.structured import (
    GrammarSpec,
    StructuredOutputsParams,
    grammar_spec,
    nesting,
)

EOS = 0
VOCAB = 40


class Word:
    """A matcher of one word of tokens, after which the sequence may end."""

    def __init__(self, word: list[int]) -> None:
        self.word, self.at = word, 0

    def accept(self, token: int) -> bool:
        good = self.at < len(self.word) and self.word[self.at] == token
        self.at += good
        return good

    def rollback(self, count: int) -> None:
        self.at -= count
        assert self.at >= 0

    def fill(self, mask: Masks) -> None:
        mask[:] = 0
        allow_token(mask, EOS if self.complete() else self.word[self.at])

    def forced(self) -> list[int]:
        return self.word[self.at :]

    def complete(self) -> bool:
        return self.at == len(self.word)

    def error(self) -> str:
        return ""


class Compiled:
    size = 100

    def __init__(self, word: list[int]) -> None:
        self.word = word

    def matcher(self) -> Word:
        return Word(self.word)


def constraint(word: list[int], tags: TagTokens | None = None, inside: bool = False) -> Constraint:
    spec = GrammarSpec("regex", "x").after_reasoning("", "", inside)
    return SequenceGrammar(Compiled(word), spec, frozenset({EOS}), tags).constraint([])


def allowed(mask: Masks) -> list[int]:
    return [token for token in range(VOCAB) if is_allowed(mask, token)]


def next_of(one: Constraint) -> list[int]:
    mask = np.zeros(words_of(VOCAB), np.int32)
    one.fill(mask)
    return allowed(mask)


# ---- requests ------------------------------------------------------------------------------------


def test_every_spelling_becomes_the_same_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = '{ "type": "object", "properties": {"a": {"type": "integer"}} }'
    made = [
        SamplingParams(json_schema=schema),
        SamplingParams(json_schema=text),
        SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(structured_outputs=StructuredOutputsParams(json=text)),
    ]
    assert len({params.grammar for params in made}) == 1
    assert made[0].grammar is not None and made[0].grammar.kind == "json_schema"
    assert SamplingParams(ebnf='root ::= "a"') == SamplingParams(
        structured_outputs=StructuredOutputsParams(grammar='root ::= "a"')
    )
    assert SamplingParams(regex="a+").grammar == GrammarSpec("regex", "a+")


def test_a_grammar_travels_to_the_engine() -> None:
    params = SamplingParams(regex="a+", max_tokens=5)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert sent == params == params.replace(max_tokens=5)
    assert sent.grammar == GrammarSpec("regex", "a+")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "only one kind"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "text"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[1]"}, "JSON object"),
        ({"json_schema": "\ud800"}, "json_schema"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"regex": "a\0b"}, "NUL"),
        ({"structured_outputs": StructuredOutputsParams()}, "exactly one"),
        ({"structured_outputs": StructuredOutputsParams(choice=[])}, "list of texts"),
        ({"structured_outputs": StructuredOutputsParams(choice=["a"], regex="a")}, "exactly one"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_wrong_grammars_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**given)


def test_nesting_ignores_brackets_in_texts() -> None:
    assert nesting(grammar_spec("json_schema", {"a": {"b": [1]}, "pattern": "(((((("}, "x")) == 3
    assert nesting(GrammarSpec("regex", r"(a(b)\((c)[d])")) == 2
    assert nesting(GrammarSpec("regex", "(" * 500)) == 500


def test_the_cache_is_bounded_in_bytes() -> None:
    cache = GrammarCache(250)
    specs = [GrammarSpec("regex", text) for text in "abc"]
    for spec in specs[:2]:
        cache.put(spec, Compiled([1]))
    assert cache.get(specs[0]) is not None
    cache.put(specs[2], Compiled([1]))
    assert cache.size == 200
    assert [cache.get(spec) is not None for spec in specs] == [True, False, True]


# ---- the constraint of a sequence ----------------------------------------------------------------


def test_a_mask_has_one_bit_for_each_token() -> None:
    mask = np.zeros(2, np.int32)
    for token in (0, 31, 32, 39, 99):
        allow_token(mask, token)
    assert allowed(mask) == [0, 31, 32, 39]
    forbid_token(mask, 31)
    assert allowed(mask) == [0, 32, 39] and not is_allowed(mask, 99)


def test_only_the_end_follows_a_complete_grammar() -> None:
    one = constraint([5, 6])
    assert next_of(one) == [5]
    for token in (5, 6):
        one.accept(token)
    assert next_of(one) == [EOS]
    one.accept(EOS)
    one.accept(17)
    assert not one.failure and len(next_of(one)) == VOCAB


def test_a_forbidden_token_is_a_failure() -> None:
    one = constraint([5, 6])
    one.accept(7)
    assert "does not allow" in one.failure and not one.in_grammar


def test_each_node_of_a_tree_of_drafts_has_a_mask_of_its_own() -> None:
    """The tree has branches that the grammar allows and forbids, also behind forbidden ones."""
    one = constraint([5, 6, 7, 8])
    one.accept(5)
    tokens = [5, 9, 6, 7, 7, 8, EOS]
    parents = [0, 0, 0, 1, 2, 4, 5]
    masks = np.full((len(tokens), words_of(VOCAB)), -1, np.int32)
    one.fill_tree(tokens, parents, masks, lambda node, forced: None)
    found = [allowed(mask) for mask in masks]
    everything = list(range(VOCAB))
    assert found == [[6], everything, [7], everything, [8], [EOS], everything]
    assert next_of(one) == [6], "the walk leaves the state as it was"


PIECES = [b"", b"</", b"think>", b"x", b"<think>", b"</think>", b">{", b">\n", b"k", b"</think>{"]


def tags() -> TagTokens:
    return TagTokens("<think>", "</think>", PIECES, [EOS], VOCAB)


def test_the_grammar_begins_after_the_closing_tag() -> None:
    one = constraint([5], tags(), inside=True)
    assert EOS not in next_of(one) and 3 in next_of(one)
    for token in (3, 1, 2):
        one.accept(token)
    assert next_of(one) == [5]


def test_a_token_cannot_leave_the_reasoning_and_go_on() -> None:
    one = constraint([5], tags(), inside=True)
    assert 9 not in next_of(one) and 6 in next_of(one)
    for piece in (b"</", b"thin", b"k"):
        one._tail += piece
    assert 6 not in next_of(one) and 7 in next_of(one)


def test_an_answer_may_begin_a_reasoning_of_its_own() -> None:
    one = constraint([5], tags())
    assert next_of(one) == [4, 5]
    one.accept(4)
    assert 3 in next_of(one)
    one.accept(5)
    assert next_of(one) == [5]
