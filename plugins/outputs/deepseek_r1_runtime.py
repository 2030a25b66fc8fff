"""Runtime of the output parser "deepseek_r1"."""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Piece, Worker
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options

OPEN = "<think>"
CLOSE = "</think>"


class DeepseekR1:
    """See ``protocols.OutputParserFactory``."""

    def __init__(self, options: DeepseekR1Options, plan: EnginePlan, worker: Worker) -> None:
        self._opening = options.opening

    def start(self, prompt_tail: str, thinking: bool | None = None) -> ThinkParser:
        return ThinkParser(starts_inside(prompt_tail, thinking, self._opening))


def starts_inside(
    prompt_tail: str, thinking: bool | None, opening: Literal["auto", "implied", "required"]
) -> bool:
    """Does the text begin as reasoning, without a tag of its own?

    A tag at the end of the prompt decides; then what the request asked for; then the option. Under
    "auto" a prompt that is known and opens nothing leaves the opening to the model; of an unknown
    one R1's template is assumed.
    """
    tail = prompt_tail.rstrip()
    if tail.endswith((OPEN, CLOSE)):
        return tail.endswith(OPEN)
    if thinking is not None:
        return thinking
    return opening == "implied" or (opening == "auto" and not tail)


class State(Enum):
    START = auto()  #: nothing but white space or a part of the opening tag so far
    REASONING = auto()
    GAP = auto()  #: white space after the closing tag
    CONTENT = auto()


class ThinkParser:
    """One sequence. White space around the reasoning, and before the content that follows it,
    belongs to the tags.

    Time is linear in the text: only a possible tag (at most seven characters) is looked at again.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._state = State.START
        self._held = ""  #: may be the beginning of a tag
        self._begun = False  #: some reasoning was given out
        self._blank: list[str] = []  #: white space that counts only if something follows it

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
        """The text has ended: a tag that was never completed is text; reasoning that was never
        closed stays so.
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
            body, self._held = body[:kept], body[kept:]
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
    """Length of the longest end of ``text`` that begins the closing tag without completing it."""
    at = text.rfind(CLOSE[0], -len(CLOSE))  # no other character of the tag is its first one
    return len(text) - at if at >= 0 and CLOSE.startswith(text[at:]) else 0
