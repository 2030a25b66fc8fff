"""Conformance suite of the ``grammar`` slot. Subclass it; define ``make`` and ``tokenizer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from glowplug.core.errors import RequestError
from glowplug.core.protocols import GrammarBackend, Matcher, words_of
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GrammarCase:
    """A grammar with texts.

    Attributes:
        spec: the grammar.
        accepted: whole texts of the grammar.
        rejected: texts that no text of the grammar begins with.
    """

    spec: GrammarSpec
    accepted: Sequence[str]
    rejected: Sequence[str]


CASES = (
    GrammarCase(GrammarSpec("regex", "[ab]{2}c{1,3}"), ["abc", "bbccc"], ["c", "aac_", "abcccc"]),
    GrammarCase(
        GrammarSpec("choice", '["no", "never", "yes"]'), ["no", "never", "yes"], ["x", "nk"]
    ),
    GrammarCase(
        GrammarSpec(
            "json_schema",
            '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],'
            '"additionalProperties":false}',
        ),
        ['{"n": 12}', '{"n":0}'],
        ["[", '{"m"', '{"n": "'],
    ),
)


class GrammarSuite:
    """Tests that every library of grammars must pass.

    Attributes:
        vocab: number of tokens of a mask, at least the tokenizer's.
    """

    vocab = 2048

    def make(self) -> GrammarBackend:
        """Return the library under test, not yet opened."""
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer with a token that ends a sequence."""
        raise NotImplementedError

    def cases(self) -> Sequence[GrammarCase]:
        """Return grammars of the kinds that the library offers, with texts."""
        return CASES

    # ---- driving ---------------------------------------------------------------------------------

    def opened(self) -> tuple[GrammarBackend, Tokenizer]:
        backend = self.make()
        tokenizer = self.tokenizer()
        backend.open(tokenizer, self.vocab)
        return backend, tokenizer

    def allowed(self, matcher: Matcher) -> set[int]:
        """Return the tokens that may follow. The mask begins full of ones."""
        mask = np.full(words_of(self.vocab), -1, np.int32)
        matcher.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    # ---- tests -----------------------------------------------------------------------------------

    def test_texts_of_the_grammar_are_followed_to_their_end(self) -> None:
        backend, tokenizer = self.opened()
        for case in self.cases():
            compiled = backend.compile(case.spec)
            assert compiled.size > 0, "the size of a grammar is needed to bound the cache"
            for text in case.accepted:
                matcher = compiled.matcher()
                for token in tokenizer.encode(text, add_special_tokens=False):
                    assert token in self.allowed(matcher), (text, token)
                    assert matcher.accept(token), (text, token)
                assert matcher.complete() and not matcher.error(), text
                assert set(tokenizer.eos_ids) & self.allowed(matcher), f"{text!r} may end"

    def test_other_texts_are_stopped(self) -> None:
        backend, tokenizer = self.opened()
        for case in self.cases():
            compiled = backend.compile(case.spec)
            for text in case.rejected:
                matcher = compiled.matcher()
                for token in tokenizer.encode(text, add_special_tokens=False):
                    before = self.allowed(matcher)
                    taken = matcher.accept(token)
                    assert taken == (token in before), "mask and acceptance disagree"
                    if not taken:
                        break
                else:
                    raise AssertionError(f"{text!r} was accepted by {case.spec}")

    def test_an_incomplete_text_may_not_end(self) -> None:
        backend, tokenizer = self.opened()
        for case in self.cases():
            matcher = backend.compile(case.spec).matcher()
            tokens = tokenizer.encode(case.accepted[0], add_special_tokens=False)
            for token in tokens[:1] if len(tokens) > 1 else []:
                assert not matcher.complete()
                assert not set(tokenizer.eos_ids) & self.allowed(matcher)
                matcher.accept(token)

    def test_tokens_taken_back_leave_no_trace(self) -> None:
        backend, tokenizer = self.opened()
        for case in self.cases():
            matcher = backend.compile(case.spec).matcher()
            masks = [self.allowed(matcher)]
            tokens = tokenizer.encode(case.accepted[-1], add_special_tokens=False)
            for token in tokens:
                matcher.accept(token)
                masks.append(self.allowed(matcher))
            for count in range(1, len(tokens) + 1):
                matcher.rollback(count)
                assert self.allowed(matcher) == masks[-1 - count]
                for token in tokens[len(tokens) - count :]:
                    assert matcher.accept(token)
                assert self.allowed(matcher) == masks[-1]

    def test_matchers_of_a_grammar_are_independent(self) -> None:
        backend, tokenizer = self.opened()
        for case in self.cases():
            compiled = backend.compile(case.spec)
            first = compiled.matcher()
            second = compiled.matcher()
            before = self.allowed(second)
            first.accept(tokenizer.encode(case.accepted[0], add_special_tokens=False)[0])
            assert self.allowed(second) == before == self.allowed(compiled.matcher())

    def test_rows_are_filled_as_by_their_matchers(self) -> None:
        backend, _ = self.opened()
        matchers = [backend.compile(case.spec).matcher() for case in self.cases()]
        masks = np.zeros((len(matchers) + 2, words_of(self.vocab)), np.int32)
        backend.fill([(matcher, row + 1) for row, matcher in enumerate(matchers)], masks)
        for row, matcher in enumerate(matchers):
            alone = np.zeros(words_of(self.vocab), np.int32)
            matcher.fill(alone)
            assert np.array_equal(masks[row + 1], alone), f"row {row + 1} has another mask"
        assert not masks[0].any() and not masks[-1].any(), "rows without matcher were written"

    def test_forbidden_tokens_cannot_be_drawn(self) -> None:
        backend, _ = self.opened()
        vocab = self.vocab
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(5, vocab, generator=generator)
        before = logits.clone()
        bits = torch.rand(2, words_of(vocab) * 32, generator=generator) < 0.3
        packed = np.packbits(bits.numpy(), axis=-1, bitorder="little").view(np.int32)
        rows = torch.tensor([3, 1])
        backend.forbid(logits, rows, torch.from_numpy(packed))
        for place, row in enumerate(rows.tolist()):
            open_ = bits[place, :vocab]
            assert torch.equal(logits[row][open_], before[row][open_]), "an allowed token changed"
            assert (logits[row][~open_] == -torch.inf).all(), "a forbidden token is left"
        others = [0, 2, 4]
        assert torch.equal(logits[others], before[others]), "a row without grammar changed"

    @pytest.mark.parametrize(
        "spec", [GrammarSpec("regex", "(a"), GrammarSpec("json_schema", '{"type":"foo"}')], ids=str
    )
    def test_an_invalid_grammar_is_refused(self, spec: GrammarSpec) -> None:
        backend, _ = self.opened()
        with pytest.raises(RequestError):
            backend.compile(spec)
