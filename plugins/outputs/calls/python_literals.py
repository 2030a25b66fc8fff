"""Literals of Python, read as they arrive and passed on as JSON. Nothing is evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from glowplug.plugins.outputs.calls.source import PEEKED, Emit, Source, ignore

Read = Generator[None, None, bool]  #: steps of a reader; its result: the literal is complete

DEPTH = 256  #: lists and dicts within one another; deeper ones are not read
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_INTEGER = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]*)(?:\.([0-9]*))?([eE][+-]?[0-9]+)?")
_ESCAPES = {
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",  # an escape of JSON
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_HEX = {"x": 2, "u": 4, "U": 8}  #: digits of a character's number
_OCTAL = re.compile(r"[0-7]{1,3}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")


class LiteralReader:
    """A reader of strings, numbers, True, False, None, lists and dicts with strings as keys.

    The words of JSON (true, false, null) are read as well. A literal that the text cuts is passed
    on as far as its JSON is certain.

    Args:
        source: the text.
        emit: function that gets the pieces of the JSON.
    """

    def __init__(self, source: Source, emit: Emit) -> None:
        self._source = source
        self._emit = emit
        self._open: list[str] = []  # brackets that are still to be closed

    def value(self) -> Read:
        """Consume a literal and pass on its JSON; the result is False if it is none, or cut."""
        self._open = []
        while True:
            first = yield from self._source.next()
            if first in ("[", "{"):
                if len(self._open) == DEPTH:
                    return False
                self._source.take()
                self._emit(first)
                self._open.append("]" if first == "[" else "}")
                begun = True
            elif (yield from self._plain(first)):
                begun = False
            else:
                return False
            if not (yield from self._to_next_value(begun)):
                return not self._open

    def _to_next_value(self, begun: bool) -> Read:
        """Close what ends, and consume the text up to the next value of a list or dict.

        Args:
            begun: a list or dict has just begun.

        Returns:
            whether a value follows. If not, ``_open`` is empty after a whole literal.
        """
        while self._open:
            first = yield from self._source.next()
            comma = first == "," and not begun
            if comma:
                self._source.take()
                first = yield from self._source.next()
            if first == self._open[-1]:  # a comma before it is allowed
                self._source.take()
                self._emit(self._open.pop())
                begun = False
                continue
            if not first or not (comma or begun):
                return False
            if comma:
                self._emit(", ")
            return self._open[-1] == "]" or (yield from self._key(first))
        return False

    def _key(self, first: str) -> Read:
        """Consume a key of a dict and its colon."""
        if first not in ('"', "'") or not (yield from self._string(first)):
            return False
        if (yield from self._source.next()) != ":":
            return False
        self._source.take()
        self._emit(": ")
        return True

    def _plain(self, first: str) -> Read:
        """Consume a string, a number or a word."""
        if first in ('"', "'"):
            return (yield from self._string(first))
        word = part = yield from self._source.word(_WORD)
        self._source.skip(len(part))
        while len(part) == PEEKED:
            part = yield from self._source.word(_WORD)
            self._source.skip(len(part))
            word += part
        made = scalar(word)
        if not made or not self._source.more:
            return False  # no literal, or one that may go on
        self._emit(made)
        return True

    def _string(self, quote: str) -> Read:
        """Consume a string, with one quote or three at each end."""
        source = self._source
        ahead = yield from source.peek(3)
        if ahead == 3 * quote:
            quote = ahead
        elif ahead in (quote, 2 * quote):  # the text ends within the quotes
            source.skip(len(ahead))
            return False
        source.skip(len(quote))
        self._emit('"')
        while tag := (yield from source.until((quote, "\\"), self._text, cut=ignore)):
            if tag == quote:
                self._emit('"')
                return True
            if not (yield from self._escape()):
                return False
        return False

    def _text(self, text: str) -> None:
        """Pass on characters of a string."""
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self) -> Read:
        """Consume an escape behind its backslash; return False if the text cuts it.

        An unknown escape stands for itself, as in Python.
        """
        source = self._source
        kind = yield from source.peek(1)
        if kind in _HEX:
            ahead = yield from source.peek(1 + _HEX[kind])
            if len(ahead) <= _HEX[kind]:
                source.skip(len(ahead))
                return False
            return self._numbered(ahead[1:], ahead)
        if "0" <= kind <= "7":
            ahead = yield from source.peek(3)
            found = _OCTAL.match(ahead)
            digits = found.group() if found else ""
            source.skip(len(digits))
            if len(digits) == len(ahead) < 3:
                return False
            self._text(chr(int(digits, 8)))
            return True
        source.skip(len(kind))
        self._text(_ESCAPES.get(kind, "\\" + kind) if kind else "")
        return bool(kind)

    def _numbered(self, digits: str, whole: str) -> bool:
        """Pass on a character by its number in hexadecimal digits, if it is one."""
        number = int(digits, 16) if _HEXADECIMAL.fullmatch(digits) else -1
        if not 0 <= number <= 0x10FFFF:
            self._text("\\" + whole[0])
            self._source.skip(1)
            return True
        self._source.skip(len(whole))
        if 0xD800 <= number <= 0xDFFF:  # a half of a pair, which JSON joins
            self._emit(f"\\u{number:04x}")
        else:
            self._text(chr(number))
        return True


def scalar(text: str) -> str:
    """Return a number or a word of Python as JSON; "" if it is none, or has no JSON."""
    if text in _WORDS:
        return _WORDS[text]
    if text in _WORDS.values():
        return text
    sign = "-" if text.startswith("-") else ""
    if _INTEGER.fullmatch(text):
        return sign + (text.lstrip("+-").replace("_", "").lstrip("0") or "0")
    found = _FLOAT.fullmatch(text)
    if not found or not (found[1] or found[2]):
        return ""
    return f"{sign}{found[1].lstrip('0') or '0'}.{found[2] or '0'}{found[3] or ''}"
