"""Runtime of the output parser "deepseek_r1"."""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import OutputRequest, Piece, ReasoningTags, Worker
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options

OPEN = "<think>"  #: tag before the reasoning
CLOSE = "</think>"  #: tag after the reasoning


class DeepseekR1:
    """The ``protocols.ReasoningParserFactory`` of :class:`ThinkParser`."""

    def __init__(self, options: DeepseekR1Options, plan: EnginePlan, worker: Worker) -> None:
        self._opening = options.opening

    def start(self, request: OutputRequest) -> ThinkParser:
        return ThinkParser(starts_inside(request.prompt_tail, request.thinking, self._opening))

    def reasoning(self, request: OutputRequest) -> ReasoningTags | None:
        inside = starts_inside(request.prompt_tail, request.thinking, self._opening)
        closed = request.prompt_tail.rstrip().endswith(CLOSE)
        if not inside and (request.thinking is False or closed):
            return None
        return ReasoningTags(OPEN, CLOSE, inside)


def starts_inside(
    prompt_tail: str, thinking: bool | None, opening: Literal["auto", "implied", "required"]
) -> bool:
    """Return whether the generated text begins as reasoning without an opening tag.

    A tag at the end of the prompt decides; without a tag, the request's ``thinking``; without
    both, the option: "implied" means yes and "required" no. "auto" means no if the prompt is known,
    because the model then writes the tag itself. If the prompt is unknown, "auto" means yes,
    because R1's template is assumed, which contains the tag.

    Args:
        prompt_tail: End of the prompt; empty if the prompt is not known.
        thinking: The request's setting; None if it has none.
        opening: The option ``opening``.
    """
    tail = prompt_tail.rstrip()
    if tail.endswith((OPEN, CLOSE)):
        return tail.endswith(OPEN)
    if thinking is not None:
        return thinking
    return opening == "implied" or (opening == "auto" and not tail)


class State(Enum):
    """The part of the generated text that a parser is reading."""

    START = auto()  #: only white space or a part of the opening tag so far
    REASONING = auto()  #: between the tags
    GAP = auto()  #: white space after the closing tag
    CONTENT = auto()  #: the answer


class ThinkParser:
    """Parser that divides the text of one sequence into reasoning and content.

    White space around the reasoning, and before the content that follows it, counts as
    part of the tags and is dropped. Time is linear in the text: only a possible tag (at most seven
    characters) is examined again.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._state = State.START
        self._held = ""  #: possible beginning of a tag
        self._begun = False  #: whether any reasoning has been returned
        self._blank: list[str] = []  #: white space that is returned only if text follows it

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._state is State.CONTENT:
            return [Piece("content", text)]
        text = self._held + text
        self._held = ""
        if self._state is State.START:
            return self._start(text)
        return self._reasoning(text) if self._state is State.REASONING else self._gap(text)

    def finish(self) -> list[Piece]:
        """Return the text that was held back, when the sequence has ended.

        An incomplete tag counts as text. Reasoning that was never closed remains reasoning.
        """
        held = self._held
        blank = "".join(self._blank)
        self._held = ""
        self._blank = []
        if self._state is State.REASONING or (self._state is State.START and self._inside):
            return [Piece("reasoning", (blank if self._begun else "") + held)] if held else []
        if self._state is State.START and blank + held:
            return [Piece("content", blank + held)]
        return []

    def _start(self, text: str) -> list[Piece]:
        stripped = text.lstrip()
        self._blank.append(text[: len(text) - len(stripped)])
        if OPEN.startswith(stripped) and stripped != OPEN:
            self._held = stripped
            return []
        if stripped.startswith(OPEN) or self._inside:
            self._state = State.REASONING
            self._blank = []
            return self._reasoning(stripped.removeprefix(OPEN))
        self._state = State.CONTENT
        blank = "".join(self._blank)
        return [Piece("content", blank + stripped)]

    def _reasoning(self, text: str) -> list[Piece]:
        body, closed, rest = text.partition(CLOSE)
        if not closed:
            kept = len(body) - partial_tag(body)
            self._held = body[kept:]
            body = body[:kept]
        if not self._begun:
            body = body.lstrip()
        solid = body.rstrip()
        pieces = []
        if solid:
            pieces.append(Piece("reasoning", "".join(self._blank) + solid))
            self._begun = True
            self._blank = []
        self._blank.append(body[len(solid) :])
        if closed:
            self._state = State.GAP
            self._blank = []
            pieces += self._gap(rest)
        return pieces

    def _gap(self, text: str) -> list[Piece]:
        text = text.lstrip()
        if not text:
            return []
        self._state = State.CONTENT
        return [Piece("content", text)]


def partial_tag(text: str) -> int:
    """Return the number of characters at the end of ``text`` that may begin the closing tag."""
    at = text.rfind(CLOSE[0], -len(CLOSE))  # the tag's first character occurs only once in it
    return len(text) - at if at >= 0 and CLOSE.startswith(text[at:]) else 0
