"""Splits one sequence's text into reasoning and content, and counts the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

from glowplug.core.protocols import OutputParser, OutputParserFactory, Piece
from glowplug.entrypoints.front.delta import Delta


class Split:
    """Chains the output parsers of one sequence. Without parsers all text is content."""

    __slots__ = ("_in_reasoning", "_parsers", "_undecided", "reasoning_tokens")

    def __init__(
        self, factories: Sequence[OutputParserFactory], prompt_tail: str, thinking: bool | None
    ) -> None:
        self._parsers: list[OutputParser] = [
            factory.start(prompt_tail, thinking) for factory in factories
        ]
        self._in_reasoning: bool | None = None
        self._undecided = 0
        self.reasoning_tokens = 0

    def feed(self, delta: Delta) -> tuple[str, str]:
        """Return (new reasoning, new content) of ``delta``; the last delta also brings what parsers
        had held back.

        ValueError for a piece of another kind: the plan admits only parsers that offer kinds which
        answers carry.
        """
        if not self._parsers:
            return "", delta.text
        pieces = self._through(delta.text, 0) if delta.text else []
        if delta.finish_reason is not None:
            pieces += self._flush()
        self._count(pieces, len(delta.token_ids))
        texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        for piece in pieces:
            if piece.kind not in texts:
                raise ValueError(
                    f"an output parser made a piece of kind {piece.kind!r}, which its offers do not name"
                )
            texts[piece.kind].append(piece.text)
        return "".join(texts["reasoning"]), "".join(texts["content"])

    def _through(self, text: str, start: int) -> list[Piece]:
        """``text`` as content through the parsers from ``start`` on."""
        pieces = [Piece("content", text)]
        for parser in self._parsers[start:]:
            pieces = [
                out
                for piece in pieces
                for out in (parser.feed(piece.text) if piece.kind == "content" else [piece])
            ]
        return pieces

    def _flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        for i, parser in enumerate(self._parsers):
            for piece in parser.finish():
                pieces += self._through(piece.text, i + 1) if piece.kind == "content" else [piece]
        return pieces

    def _count(self, pieces: list[Piece], tokens: int) -> None:
        """Tokens belong to the kind of text they brought; tokens held back, to what comes out next."""
        self._undecided += tokens
        if not pieces:
            if self._in_reasoning is not None:
                self.reasoning_tokens += self._undecided * self._in_reasoning
                self._undecided = 0
            return
        mixed_or_reasoning = pieces[0].kind == "reasoning"
        self.reasoning_tokens += self._undecided * mixed_or_reasoning
        self._undecided = 0
        self._in_reasoning = pieces[-1].kind == "reasoning"
