"""Answers of a turn: how they are generated, and their parts.

The text of an answer passes through the plan's output parsers, a chain in which each one parses the
content that the parsers before it left. Parsers of reasoning come first, parsers of tool calls
last.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from glowplug.core.errors import RequestError
from glowplug.core.protocols import (
    OutputParser,
    OutputParserFactory,
    OutputRequest,
    Piece,
    ToolParserFactory,
)
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.front.reasoning_tags import after_reasoning

KINDS = frozenset({"reasoning", "content", "tool_call"})  #: kinds of pieces that answers can have
NO_PARSER = (
    "tools need a parser of tool calls, and this server has none for the model's format; "
    "start it with --tool-call-parser NAME (glowplug plugins lists them), or leave tools out"
)


def new_call_id() -> str:
    """Return a new id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def tool_parser(parsers: Sequence[OutputParserFactory]) -> ToolParserFactory | None:
    """Return the first of the parsers that parses tool calls, or None."""
    found = (one for one in parsers if hasattr(one, "call_grammar"))
    return cast(ToolParserFactory, next(found, None))


@dataclass(frozen=True)
class AnswerForm:
    """The form of a turn's answers: their sampling parameters, and the parsers of their text.

    Attributes:
        params: sampling parameters, with the grammar of the answer.
        request: the part of the request that parsers get.
        parsers: the parsers of an answer's text, in order.
    """

    params: SamplingParams
    request: OutputRequest
    parsers: Sequence[OutputParserFactory] = ()

    def start(self) -> AnswerParser:
        """Return the parser of one answer."""
        return AnswerParser(
            [factory.start(self.request) for factory in self.parsers],
            parallel=self.request.tool_choice.parallel,
        )


def answer_form(
    request: OutputRequest,
    parsers: Sequence[OutputParserFactory],
    params: SamplingParams,
    *,
    separate_reasoning: bool = True,
) -> AnswerForm:
    """Return the form of a turn's answers.

    Args:
        request: the part of the request that parsers get.
        parsers: the plan's output parsers.
        params: sampling parameters that the request gives.
        separate_reasoning: False leaves reasoning in the content.

    Raises:
        RequestError: the plan's parsers cannot parse or force the calls that the request wants.
    """
    request = replace(request, response_format=params.grammar)
    if request.tools:
        params = _with_calls(request, parsers, params)
    params = after_reasoning(params, parsers, request)
    ordered = sorted(parsers, key=lambda one: hasattr(one, "call_grammar"))
    if not separate_reasoning:
        ordered = [one for one in ordered if hasattr(one, "call_grammar")]
    return AnswerForm(params, request, ordered)


def _with_calls(
    request: OutputRequest, parsers: Sequence[OutputParserFactory], params: SamplingParams
) -> SamplingParams:
    """Return sampling parameters of an answer that may, or has to, have tool calls."""
    parser = tool_parser(parsers)
    if parser is None:
        raise RequestError(NO_PARSER, param="tools", code="unsupported_parameter")
    if parser.shows_special:
        params = params.replace(skip_special_tokens=False)
    required = request.tool_choice.mode == "required"
    if not required and params.grammar is not None:
        raise RequestError(
            "response_format and other grammars apply to the whole answer, so that no tool could "
            'be called: set tool_choice to "none" or "required", or leave out tools or the grammar',
            param="tools",
            code="unsupported_parameter",
        )
    if not required and not any(tool.strict for tool in request.tools):
        return params
    grammar = parser.call_grammar(request)
    if grammar is None and required:
        raise RequestError(
            "this server's parser of tool calls cannot require a call",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return params.replace(grammar=grammar)


class AnswerParser:
    """The parser of one answer's text, a chain of output parsers.

    Without parsers all text is content.

    Attributes:
        reasoning_tokens: number of tokens of the reasoning so far.
        calls: number of tool calls so far.
    """

    __slots__ = (
        "_in_reasoning",
        "_parallel",
        "_parsers",
        "_undecided",
        "calls",
        "reasoning_tokens",
    )

    def __init__(self, parsers: Sequence[OutputParser] = (), *, parallel: bool = True) -> None:
        self._parsers = parsers
        self._parallel = parallel
        self._in_reasoning: bool | None = None
        self._undecided = 0
        self.reasoning_tokens = 0
        self.calls = 0

    def feed(self, delta: Delta) -> list[Piece]:
        """Parse the next delta and return its pieces, neighbours of one kind or call joined.

        With the last delta, the text that parsers held back is returned as well. The first piece of
        a call has an "id" in any case. If the request allows one call, others are left out.

        Raises:
            ValueError: a parser returned a piece of an unknown kind.
        """
        if not self._parsers:
            return [Piece("content", delta.text)] if delta.text else []
        pieces = self._parse_from(delta.text, 0) if delta.text else []
        if delta.finish_reason is not None:
            pieces += self._flush()
        self._count(pieces, len(delta.token_ids))
        return joined([made for piece in pieces if (made := self._checked(piece)) is not None])

    def finish_reason(self, delta: Delta) -> str | None:
        """Return the reason of the answer's end: "tool_calls" if it ended by itself with calls."""
        return "tool_calls" if self.calls and delta.finish_reason == "stop" else delta.finish_reason

    def _checked(self, piece: Piece) -> Piece | None:
        """Return a parser's piece as the answer has it; None if the answer leaves it out."""
        if piece.kind not in KINDS:
            raise ValueError(f"an output parser returned a piece of kind {piece.kind!r}")
        if piece.kind != "tool_call":
            return piece if piece.text else None
        if piece.data is None:
            raise ValueError("an output parser returned a piece of a tool call without its data")
        if piece.data["index"] and not self._parallel:
            return None
        if "name" not in piece.data:
            return piece
        self.calls += 1
        return (
            piece
            if "id" in piece.data
            else replace(piece, data={**piece.data, "id": new_call_id()})
        )

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


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with neighbours of one kind, or of one call, joined."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        starts_call = piece.data is not None and "name" in piece.data
        if runs and runs[-1][0].kind == piece.kind and not starts_call:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [
        run[0] if len(run) == 1 else replace(run[0], text="".join(one.text for one in run))
        for run in runs
    ]


@dataclass
class ToolCall:
    """A tool call of an answer.

    Attributes:
        id: id of the call, to which the message with the tool's result refers.
        name: name of the function.
        parts: the arguments so far, as pieces of JSON text.
    """

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The arguments as JSON text; invalid JSON if the answer ended within the call."""
        return "".join(self.parts)

    def described(self) -> dict[str, Any]:
        """Return the call as in a message of OpenAI's chat API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class AnswerParts:
    """The parts of one answer so far.

    Attributes:
        reasoning, content: pieces of text.
        calls: the tool calls, in order.
    """

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add pieces that :meth:`AnswerParser.feed` returned."""
        for piece in pieces:
            if piece.kind == "reasoning":
                self.reasoning.append(piece.text)
            elif piece.kind == "content":
                self.content.append(piece.text)
            else:
                data = piece.data or {}
                if "name" in data:
                    self.calls.append(ToolCall(data["id"], data["name"]))
                self.calls[data["index"]].parts.append(piece.text)

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of OpenAI's chat API, to be added to the conversation."""
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.calls else ""),
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [call.described() for call in self.calls]
        return message
