"""Output of a conversation: answers on stdout, with dimmed reasoning on a terminal."""

from __future__ import annotations

import sys
from typing import Literal, TextIO

DIM = "\x1b[2m"
PLAIN = "\x1b[0m"
#: control characters except tab and line feed -> visible text: a terminal would execute them
ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def without_controls(text: str) -> str:
    """Replace control characters, such as those of terminal commands, by visible escapes."""
    return text.translate(ESCAPES)


class Screen:
    """The output of a conversation.

    Args:
        out: stream for answers.
        interactive: messages come from a terminal; notes then go to ``out`` and not to stderr.
        color: dim reasoning and notes on a terminal.
        reasoning: print reasoning; "auto": if ``out`` is a terminal.
    """

    def __init__(
        self,
        out: TextIO,
        interactive: bool,
        color: bool = True,
        reasoning: Literal["auto", "show", "hide"] = "auto",
    ) -> None:
        terminal = out.isatty()
        self.interactive = interactive
        self._out = out
        self._dims = terminal and color
        self._reasons = reasoning == "show" or (reasoning == "auto" and terminal)
        self._part = ""  # part of the answer that is being written: "reasoning" or "content"

    def write(self, reasoning: str, content: str) -> None:
        """Write the next text of an answer."""
        if reasoning and self._reasons:
            self._enter("reasoning")
            self._out.write(without_controls(reasoning))
        if content:
            self._enter("content")
            self._out.write(without_controls(content))
        self._out.flush()

    def _enter(self, part: str) -> None:
        if part == self._part:
            return
        if self._part:
            self._out.write(f"{PLAIN if self._dims else ''}\n\n")
        if part == "reasoning" and self._dims:
            self._out.write(DIM)
        self._part = part

    def end(self, note: str = "") -> None:
        """End an answer. ``note``: remark about its end."""
        self._out.write((PLAIN if self._dims else "") + "\n")
        self._out.flush()
        self._part = ""
        if note:
            self.note(note)

    def note(self, text: str) -> None:
        """Write a remark that belongs to no answer."""
        shown = without_controls(text)
        if not self.interactive:
            print(shown, file=sys.stderr)
            return
        self._out.write(f"{DIM}{shown}{PLAIN}\n" if self._dims else f"{shown}\n")
        self._out.flush()
