"""Conformance suite of output parsers. Subclass ParserSuite; define ``make`` and ``cases``."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from glowplug.core.protocols import OutputParser, OutputParserFactory, OutputRequest, Piece
from glowplug.core.step.tools import Tool, ToolChoice

CHECKED = 1 << 16  #: characters between two looks at the clock
FAR = 10  #: factor of the most processor time after which a text is given up
MOST_GROWTH = 8  #: factor of time for four times the text: 4 if it is linear, 16 if quadratic


@dataclass(frozen=True)
class Case:
    """A generated text and its parsed form.

    Attributes:
        text: the generated text.
        parts: (kind, text) in order, with neighbours of one kind joined.
            A tool call is ("tool_call", its id, its name and its arguments, separated by spaces);
            an id that the format does not state is left out.
        prompt_tail: last characters of the prompt.
        thinking: the request's reasoning switch; None: not set.
        tools: the request's tools.
        earlier_calls: tool calls in the conversation so far.
    """

    text: str
    parts: Sequence[tuple[str, str]]
    prompt_tail: str = ""
    thinking: bool | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    earlier_calls: int = 0

    @property
    def request(self) -> OutputRequest:
        """The request of the generated text."""
        return OutputRequest(
            self.prompt_tail, self.thinking, self.tools, self.tool_choice, self.earlier_calls
        )


def joined(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return (kind, text) of the pieces, with neighbours of one kind and of one call joined.

    Raises:
        AssertionError: a piece of a tool call has no data, a call begins without a name, or calls
            are not numbered from 0 in order.
    """
    parts: list[tuple[str, str]] = []
    calls = 0
    for piece in pieces:
        if piece.kind != "tool_call":
            if parts and parts[-1][0] == piece.kind:
                parts[-1] = (piece.kind, parts[-1][1] + piece.text)
            else:
                parts.append((piece.kind, piece.text))
            continue
        assert piece.data is not None, piece
        begins = "name" in piece.data
        calls += begins
        assert piece.data["index"] == calls - 1 >= 0, piece
        if begins:
            parts.append((piece.kind, _beginning(piece)))
        else:
            assert parts[-1][0] == piece.kind, piece
            parts[-1] = (piece.kind, parts[-1][1] + piece.text)
    return parts


def _beginning(piece: Piece) -> str:
    """Return the text of the first piece of a call, with its id, if it has one, and its name."""
    data = piece.data or {}
    return " ".join([*(data[key] for key in ("id", "name") if key in data), piece.text])


def run(parser: OutputParser, chunks: Sequence[str]) -> list[tuple[str, str]]:
    """Feed the chunks to a parser and return its joined pieces."""
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return joined([*pieces, *parser.finish()])


def split_at(text: str, places: Sequence[int]) -> list[str]:
    """Cut a text at the given places."""
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]


class ParserSuite:
    """Tests of ``protocols.OutputParser``: chunk boundaries must not change the result."""

    seconds_a_megabyte = 1.0  #: most processor time for a megabyte of adversarial text
    plain_request = OutputRequest()  #: request of the tests without a case

    def make(self) -> OutputParserFactory:
        """Return the parser factory under test."""
        raise NotImplementedError

    def cases(self) -> Sequence[Case]:
        """Return texts of the format under test, with their parsed forms.

        There should be a plain text, texts with every construct of the format, texts that end
        within each construct, and texts with Unicode and with white space.
        """
        raise NotImplementedError

    def adversarial(self) -> Sequence[str]:
        """Return patterns to repeat for a megabyte: parts of tags, white space, nesting."""
        return ["<", "</", " ", "\n", "{", "[", '"', "\\", "<<think>", "</think", "a"]

    def start(self, case: Case) -> OutputParser:
        """Return a parser for a case."""
        return self.make().start(case.request)

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
        parser = self.make().start(self.plain_request)
        assert [*parser.feed(""), *parser.finish()] == []

    def test_sequences_are_independent(self) -> None:
        factory = self.make()
        cases = self.cases()
        parsers = [factory.start(case.request) for case in cases]
        pieces: list[list[Piece]] = [[] for _ in cases]
        for at in range(max(len(case.text) for case in cases)):
            for parser, case, got in zip(parsers, cases, pieces, strict=True):
                got.extend(parser.feed(case.text[at : at + 1]))
        for parser, case, got in zip(parsers, cases, pieces, strict=True):
            assert joined([*got, *parser.finish()]) == list(case.parts), case

    def test_time_is_linear(self) -> None:
        most = self.seconds_a_megabyte
        for pattern in self.adversarial():
            text = pattern * ((1 << 20) // len(pattern))
            for size in (64, 1 << 20):
                spent = self._seconds(text, size)
                if spent >= most:  # on a busy machine the time still grows with the length alone
                    quarter = self._seconds(text[: len(text) // 4], size)
                    assert spent < MOST_GROWTH * quarter, (pattern, size, spent, quarter)

    def _seconds(self, text: str, size: int) -> float:
        """Return the processor time for a text in pieces of ``size``; inf if it is far too long."""
        parser = self.make().start(self.plain_request)
        start = time.process_time()
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
            if not at % CHECKED and time.process_time() - start > FAR * self.seconds_a_megabyte:
                return inf
        parser.finish()
        return time.process_time() - start
