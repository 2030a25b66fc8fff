"""Protocols used by the front process: the executor of the ranks, and parsers of output text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from glowplug.core.plan.plan import EnginePlan


@dataclass(frozen=True)
class Piece:
    """A piece of parsed output.

    Attributes:
        kind: "content", "reasoning" or "tool_call".
        text: text of the piece.
        data: fields of a tool call; None for other kinds.
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

    def start(self, prompt_tail: str, thinking: bool | None = None) -> OutputParser:
        """Return a parser for one sequence.

        Args:
            prompt_tail: last characters of the rendered prompt, which may already contain the
                opening tag.
            thinking: whether the request turned reasoning on or off; None: it did neither.
        """
        ...


class ReasoningParserFactory(OutputParserFactory, Protocol):
    """A factory of parsers of reasoning, behind which the grammar of an answer can begin.

    Without this method, the grammar of a request begins at once.
    """

    def reasoning(self, prompt_tail: str, thinking: bool | None = None) -> ReasoningTags | None:
        """Return the tags of the answer's reasoning; None if the answer has no reasoning.

        The arguments are those of ``start``.
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
