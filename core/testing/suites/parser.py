"""Conformance suite of the output parsers. Subclass :class:`ParserSuite`, give ``make`` and
``cases``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.core.protocols import OutputParser, OutputParserFactory, Piece


@dataclass(frozen=True)
class Case:
    """A generated text and what it means. ``parts``: (kind, text) in order, neighbours of one kind
    joined.
    """

    text: str
    parts: Sequence[tuple[str, str]]
    prompt_tail: str = ""
    thinking: bool | None = None


def joined(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """(kind, text) with neighbours of one kind joined; pieces that carry data stay single."""
    parts: list[tuple[str, str]] = []
    for piece in pieces:
        if parts and parts[-1][0] == piece.kind and piece.data is None:
            parts[-1] = (piece.kind, parts[-1][1] + piece.text)
        else:
            parts.append((piece.kind, piece.text))
    return parts


def run(parser: OutputParser, chunks: Sequence[str]) -> list[tuple[str, str]]:
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return joined([*pieces, *parser.finish()])


def split_at(text: str, places: Sequence[int]) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]


class ParserSuite:
    """Every promise of ``protocols.OutputParser``: the way a text is cut into steps changes
    nothing.
    """

    seconds_a_megabyte = 1.0  #: most processor time for one adversarial megabyte

    def make(self) -> OutputParserFactory:
        """Your factory."""
        raise NotImplementedError

    def cases(self) -> Sequence[Case]:
        """Texts of your format: plain, with every construct, truncated in each of them, Unicode,
        white space.
        """
        raise NotImplementedError

    def adversarial(self) -> Sequence[str]:
        """Patterns to repeat for a megabyte: parts of your tags, white space, nesting."""
        return ["<", "</", " ", "\n", "{", "[", '"', "\\", "<<think>", "</think", "a"]

    def start(self, case: Case) -> OutputParser:
        return self.make().start(case.prompt_tail, case.thinking)

    def test_whole(self) -> None:
        for case in self.cases():
            assert run(self.start(case), [case.text]) == list(case.parts), case

    def test_every_split(self) -> None:
        for case in self.cases():
            for place in range(len(case.text) + 1):
                assert run(self.start(case), split_at(case.text, [place])) == list(case.parts), (
                    case,
                    place,
                )

    def test_character_by_character(self) -> None:
        for case in self.cases():
            assert run(self.start(case), list(case.text)) == list(case.parts), case

    def test_random_splits(self) -> None:
        generator = random.Random(5)
        for case in self.cases():
            for _ in range(30):
                places = [
                    generator.randint(0, len(case.text)) for _ in range(generator.randint(0, 6))
                ]
                assert run(self.start(case), split_at(case.text, places)) == list(case.parts), (
                    case,
                    places,
                )

    def test_every_truncation_streams_as_it_parses_whole(self) -> None:
        for case in self.cases():
            for length in range(len(case.text)):
                text = case.text[:length]
                assert run(self.start(case), list(text)) == run(self.start(case), [text]), (
                    case,
                    length,
                )

    def test_empty(self) -> None:
        parser = self.make().start("")
        assert [*parser.feed(""), *parser.finish()] == []

    def test_sequences_are_independent(self) -> None:
        factory = self.make()
        cases = self.cases()
        parsers = [factory.start(case.prompt_tail, case.thinking) for case in cases]
        pieces: list[list[Piece]] = [[] for _ in cases]
        for at in range(max(len(case.text) for case in cases)):
            for parser, case, got in zip(parsers, cases, pieces, strict=True):
                got.extend(parser.feed(case.text[at : at + 1]))
        for parser, case, got in zip(parsers, cases, pieces, strict=True):
            assert joined([*got, *parser.finish()]) == list(case.parts), case

    def test_time_is_linear(self) -> None:
        for pattern in self.adversarial():
            text = pattern * ((1 << 20) // len(pattern))
            for size in (64, 1 << 20):
                parser = self.make().start("")
                start = time.process_time()
                for at in range(0, len(text), size):
                    parser.feed(text[at : at + size])
                parser.finish()
                spent = time.process_time() - start
                assert spent < self.seconds_a_megabyte, (pattern, size, spent)
