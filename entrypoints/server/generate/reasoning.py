"""Splitting of a sequence's text into reasoning and content."""

from __future__ import annotations

from collections.abc import Sequence

from glowplug.core.protocols import OutputParser, OutputParserFactory, Piece
from glowplug.entrypoints.front.delta import Delta


class ReasoningSplitter:
    """The splitter of one sequence's text into reasoning and content, a chain of output parsers.

    Without parsers all text is content.

    Attributes:
        reasoning_tokens: number of tokens of the reasoning so far.
    """

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
        """Parse the next delta and return (new reasoning, new content).

        With the last delta, the text that parsers held back is returned as well.

        Raises:
            ValueError: a parser returned a piece that is neither reasoning nor content. The plan
                refuses parsers whose offers declare other kinds.
        """
        if not self._parsers:
            return "", delta.text
        pieces = self._parse_from(delta.text, 0) if delta.text else []
        if delta.finish_reason is not None:
            pieces += self._flush()
        self._count(pieces, len(delta.token_ids))
        texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        for piece in pieces:
            if piece.kind not in texts:
                raise ValueError(
                    f"an output parser returned a piece of kind {piece.kind!r}, "
                    "which its offers do not name"
                )
            texts[piece.kind].append(piece.text)
        return "".join(texts["reasoning"]), "".join(texts["content"])

    def _parse_from(self, text: str, start: int) -> list[Piece]:
        """Parse content by the parsers from index ``start`` on and return the resulting pieces."""
        pieces = [Piece("content", text)]
        for parser in self._parsers[start:]:
            pieces = [
                out
                for piece in pieces
                for out in (parser.feed(piece.text) if piece.kind == "content" else [piece])
            ]
        return pieces

    def _flush(self) -> list[Piece]:
        """Return the pieces of text that the parsers held back, at the end of the sequence."""
        pieces: list[Piece] = []
        for i, parser in enumerate(self._parsers):
            for piece in parser.finish():
                pieces += (
                    self._parse_from(piece.text, i + 1) if piece.kind == "content" else [piece]
                )
        return pieces

    def _count(self, pieces: list[Piece], tokens: int) -> None:
        """Add a delta's tokens to ``reasoning_tokens`` if the delta is reasoning.

        The first piece decides. A delta without pieces continues the kind of the last piece. Before
        the sequence's first piece, tokens are kept and then counted as that piece is.

        Args:
            pieces: the delta's text, parsed.
            tokens: the delta's number of tokens.
        """
        self._undecided += tokens
        if not pieces:
            if self._in_reasoning is not None:
                self.reasoning_tokens += self._undecided * self._in_reasoning
                self._undecided = 0
            return
        begins_in_reasoning = pieces[0].kind == "reasoning"
        self.reasoning_tokens += self._undecided * begins_in_reasoning
        self._undecided = 0
        self._in_reasoning = pieces[-1].kind == "reasoning"
