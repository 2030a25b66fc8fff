"""The grammar of one sequence while it runs: which tokens may follow, also behind drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from glowplug.core.protocols import CompiledGrammar, Masks, words_of
from glowplug.core.step.structured import GrammarSpec

ANY = np.int32(-1)  #: word of a mask that allows its 32 tokens


#: function of the index of a token and the tokens that have to follow it
Forced = Callable[[int, Seq[int]], None]


class AnswerPart(Enum):
    """The part of the answer that comes next."""

    START = auto()  #: the grammar, or the opening tag of a reasoning
    REASONING = auto()  #: any text up to the closing tag
    GRAMMAR = auto()  #: text that the grammar allows
    END = auto()  #: nothing: the sequence has ended


class TagTokens:
    """The tokens of a vocabulary in relation to the tags of a reasoning.

    A token that would complete the closing tag and go on with other text than white space is not
    allowed, because the grammar could not begin within it.

    Args:
        opening: the opening tag.
        closing: the closing tag.
        pieces: the bytes of each token, by id.
        eos: tokens that end a sequence; they are not allowed within the reasoning.
        vocab: number of tokens of a mask.
    """

    def __init__(
        self, opening: str, closing: str, pieces: Seq[bytes], eos: Iterable[int], vocab: int
    ) -> None:
        self.closing = closing.encode()
        self.pieces = pieces
        start = opening.encode()
        self.opening = next((i for i, piece in enumerate(pieces) if start and piece == start), -1)
        everything = np.full(words_of(vocab), ANY, np.int32)
        for token in eos:
            forbid_token(everything, token)
        for token in self._beyond(b""):
            forbid_token(everything, token)
        #: masks within the reasoning, by the number of bytes of the tag that have been read
        self.masks = [everything]
        for read in range(1, len(self.closing)):
            mask = everything.copy()
            for token in self._beyond(self.closing[:read]):
                forbid_token(mask, token)
            self.masks.append(mask)

    def _beyond(self, read: bytes) -> list[int]:
        """Return the tokens that complete the tag after ``read`` and go on with other text."""
        rest = self.closing[len(read) :]
        found = []
        for token, piece in enumerate(self.pieces):
            at = piece.find(rest) if not read else 0 if piece.startswith(rest) else -1
            if at >= 0 and piece[at + len(rest) :].strip():
                found.append(token)
        return found

    def read(self, tail: bytes) -> int:
        """Return how many of the tag's first bytes ``tail`` ends with."""
        most = min(len(tail), len(self.closing) - 1)
        return next(
            (count for count in range(most, 0, -1) if tail.endswith(self.closing[:count])), 0
        )


@dataclass(frozen=True, eq=False)
class SequenceGrammar:
    """The compiled grammar of a sequence.

    Attributes:
        compiled: the grammar.
        spec: the grammar as stated, which has the tags of the reasoning.
        eos: tokens that end a sequence.
        tags: the tokens in relation to these tags; None without a reasoning.
    """

    compiled: CompiledGrammar
    spec: GrammarSpec
    eos: frozenset[int]
    tags: TagTokens | None = None

    def constraint(self, tokens: Iterable[int]) -> Constraint:
        """Return the constraint of a sequence after its output ``tokens`` so far."""
        made = Constraint(self)
        for token in tokens:
            made.accept(token)
        return made


class Constraint:
    """The tokens that may follow in one sequence.

    Attributes:
        failure: why the grammar cannot be followed any further; "" if it can.
        matcher: state within the grammar.
    """

    def __init__(self, grammar: SequenceGrammar) -> None:
        self.failure = ""
        self.matcher = grammar.compiled.matcher()
        self._eos = grammar.eos
        self._tags = grammar.tags
        self._tail = b""
        self._part = AnswerPart.GRAMMAR
        if grammar.tags is not None:
            self._part = AnswerPart.REASONING if grammar.spec.inside else AnswerPart.START

    @property
    def in_grammar(self) -> bool:
        """Return whether ``matcher`` alone decides on the next token."""
        return self._part is AnswerPart.GRAMMAR and not self.failure

    def accept(self, token: int) -> None:
        """Advance by a token of the answer; tokens after the end have no effect."""
        if self._part is AnswerPart.GRAMMAR and not self.failure and token not in self._eos:
            taken = self.matcher.accept(token)
        else:
            ended = self._part is AnswerPart.END or bool(self.failure)
            taken = ended or self._push(token) is not None
        if not taken:
            self.failure = self.matcher.error() or "the grammar does not allow a token that follows"

    def fill(self, mask: Masks) -> None:
        """Write the tokens that may follow to ``mask`` [words]."""
        if self._part is AnswerPart.REASONING and self._tags is not None:
            mask[:] = self._tags.masks[self._tags.read(self._tail)]
        elif self._part is AnswerPart.END or self.failure:
            mask[:] = ANY
        else:
            self.matcher.fill(mask)
            if (
                self._part is AnswerPart.START
                and self._tags is not None
                and self._tags.opening >= 0
            ):
                allow_token(mask, self._tags.opening)
            self.check(mask, bool(mask.any()))

    def check(self, mask: Masks, some: bool) -> None:
        """Note a failure of the matcher that has just filled ``mask``, and allow every token.

        ``some``: the mask allows a token.
        """
        self.failure = self.matcher.error()
        if not self.failure and not some:
            self.failure = "the grammar allows no token of this model here"
        if self.failure:
            mask[:] = ANY

    def forced(self) -> Seq[int]:
        """Return the tokens that have to follow, after ``fill``; none if there is a choice."""
        return self.matcher.forced() if self.in_grammar else ()

    def fill_tree(
        self,
        tokens: Seq[int],
        parents: Seq[int],
        masks: Masks,
        forced: Forced,
    ) -> None:
        """Write the tokens that may follow each token of a row's drafts.

        Tokens that the grammar forbids, and those behind them, get no mask.

        Args:
            tokens: token ids; the first one has been accepted, the others are drafts.
            parents: index of each token's parent, which precedes it.
            masks: [tokens, words], full of ones.
            forced: called with each token's index and the tokens that have to follow it.
        """
        children = _children(parents)
        self.fill(masks[0])
        forced(0, self.forced())
        undo: list[Callable[[], None]] = []
        # (node, depth) in the order of a walk that finishes each child before its next sibling
        waiting = [(node, 1) for node in children[0]]
        while waiting and not self.failure:
            node, depth = waiting.pop()
            _take_back(undo, depth - 1)
            allowed = is_allowed(masks[parents[node]], tokens[node])
            taken = self._push(tokens[node]) if allowed else None
            if taken is not None:
                undo.append(taken)
                self.fill(masks[node])
                forced(node, self.forced())
                waiting += [(child, depth + 1) for child in children[node]]
        _take_back(undo, 0)

    # ---- inside ----------------------------------------------------------------------------------

    def _push(self, token: int) -> Callable[[], None] | None:
        """Advance by a token and return what takes it back; None if it is not allowed."""
        part = self._part
        tail = self._tail
        counted = 0
        if part is AnswerPart.START and self._tags is not None and token == self._tags.opening:
            self._part = AnswerPart.REASONING
        elif part is AnswerPart.REASONING and self._tags is not None:
            self._read(self._tags, token)
        elif part is not AnswerPart.END:
            if token in self._eos:
                if not self.matcher.complete():
                    return None
                self._part = AnswerPart.END
            elif self.matcher.accept(token):
                counted = 1
                self._part = AnswerPart.GRAMMAR
            else:
                return None

        def undo() -> None:
            self._part = part
            self._tail = tail
            if counted:
                self.matcher.rollback(counted)

        return undo

    def _read(self, tags: TagTokens, token: int) -> None:
        """Advance within the reasoning, and leave it if ``token`` completes the closing tag."""
        piece = tags.pieces[token] if token < len(tags.pieces) else b""
        text = self._tail + piece
        if tags.closing in text:
            self._part = AnswerPart.GRAMMAR
        self._tail = text[-len(tags.closing) :]


def _children(parents: Seq[int]) -> list[list[int]]:
    """Return the children of each node of a tree, the last ones first."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].append(node)
    return children


def _take_back(undo: list[Callable[[], None]], depth: int) -> None:
    """Call the last functions of ``undo`` until ``depth`` of them are left."""
    while len(undo) > depth:
        undo.pop()()


def forbid_token(mask: Masks, token: int) -> None:
    """Remove ``token`` from ``mask`` [words]; tokens outside the mask have no effect."""
    if token >> 5 < len(mask):
        mask.view(np.uint32)[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


def allow_token(mask: Masks, token: int) -> None:
    """Add ``token`` to ``mask`` [words]."""
    if token >> 5 < len(mask):
        mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))


def is_allowed(mask: Masks, token: int) -> bool:
    """Return whether ``mask`` [words] has ``token``."""
    return token >> 5 < len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)
