"""Protocols used by the front process: the executor of the ranks, and parsers of output text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.step.tools import Tool, ToolChoice


@dataclass(frozen=True)
class Piece:
    """A piece of parsed output.

    A tool call is a run of pieces of kind "tool_call" with the same ``index``. Its first piece has
    the name of the function. The texts of all its pieces, joined, are the arguments as JSON.

    Attributes:
        kind: "content", "reasoning" or "tool_call".
        text: text of the piece; of a tool call, further characters of the arguments.
        data: None for content and reasoning. For a tool call, "index": number of the call in the
            answer, from 0. The first piece of a call also has "name", and "id" if the format states
            one; otherwise the front makes an id.
    """

    kind: str
    text: str
    data: Mapping[str, Any] | None = None


class OutputParser(Protocol):
    """A parser of one generated text; ``OutputParserFactory.start`` makes one for each sequence."""

    def feed(self, text: str) -> list[Piece]:
        """Parse further text and return the pieces that are ready."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces that are left at the end of the text."""
        ...


@dataclass(frozen=True)
class OutputRequest:
    """The part of a request on which the parsing of its answer depends.

    Attributes:
        prompt_tail: last characters of the rendered prompt, which may already contain an opening
            tag; "": the prompt is not known.
        thinking: whether the request turned reasoning on or off; None: it did neither.
        tools: the tools that the model may call. They are empty if ``tool_choice`` is "none".
        tool_choice: the request's rule for calls.
        earlier_calls: number of tool calls in the conversation so far, for formats that number
            calls over a conversation.
        response_format: the grammar of the answer's content; None: any text.
    """

    prompt_tail: str = ""
    thinking: bool | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    earlier_calls: int = 0
    response_format: GrammarSpec | None = None


@dataclass(frozen=True)
class ReasoningTags:
    """The tags of a reasoning at the beginning of an answer.

    Attributes:
        opening: tag with which the answer may begin a reasoning; "": it may not.
        closing: tag at the end of the reasoning.
        inside: the answer begins inside the reasoning.
    """

    opening: str
    closing: str
    inside: bool


class OutputParserFactory(Protocol):
    """A factory of parsers for one output format."""

    def start(self, request: OutputRequest) -> OutputParser:
        """Return a parser for one sequence."""
        ...


class ReasoningParserFactory(OutputParserFactory, Protocol):
    """A factory of parsers of reasoning, behind which the grammar of an answer can begin.

    Without this method, the grammar of a request begins at once.
    """

    def reasoning(self, request: OutputRequest) -> ReasoningTags | None:
        """Return the tags of the answer's reasoning; None if the answer has no reasoning."""
        ...


class ToolParserFactory(OutputParserFactory, Protocol):
    """A factory of parsers of tool calls.

    A request with tools is refused unless one of the plan's parsers has this method.

    Attributes:
        shows_special: the calls are marked by special tokens, so the parser needs their text.
    """

    shows_special: bool

    def call_grammar(self, request: OutputRequest) -> GrammarSpec | None:
        """Return the grammar of an answer with the calls that a request demands, or None.

        The method is called if a call is required, or if a tool is strict. ``start`` returns a
        parser of the answers that the grammar allows, which are best in the format on which the
        model was trained: a structural tag expresses most formats. None: the format needs no
        grammar here; a request that requires a call is then refused.
        """
        ...


class Executor(Protocol):
    """The object that runs the ranks, and the front's only link to them.

    Messages are bytes; see ``core/step/messages.py``.

    Attributes:
        leads: True: the front runs in this process. False: it runs on another host, and here only
            ``start`` is called, then ``outputs`` until it raises.

    An executor may have a property ``progress``: the start-up phase of each rank by its number,
    with its completed share ("weights 41%"). It is read from another thread while ``start`` runs.
    """

    leads: bool

    def start(self, plan: EnginePlan) -> None:
        """Start the ranks, load and warm up; return when every rank is ready.

        Raises:
            EngineDead: a rank failed; the message has rank, phase and reason.
        """
        ...

    def submit(self, data: bytes) -> None:
        """Send a frame of messages to the engine."""
        ...

    def outputs(self, timeout: float | None) -> bytes | None:
        """Return the engine's next frame of messages, or None after ``timeout`` seconds.

        Raises:
            EngineDead: a rank failed; the message has rank, phase and reason.
            EngineStopped: ``stop`` was called.
        """
        ...

    def stop(self) -> None:
        """End every rank. Further calls do nothing."""
        ...
