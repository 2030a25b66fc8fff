"""Text that arrives in pieces, for parsers that are written as generators.

A parser's generator yields when it needs more text, and is resumed with each piece. The source
looks at each character a bounded number of times, so a parser is linear in the text however the
text is cut, and keeps only the text that it collects itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache

Steps = Generator[None, None, None]  #: steps of a parser; it yields when it needs more text
Found = Generator[None, None, str]
Emit = Callable[[str], object]

PEEKED = 256  #: characters that are looked at without being consumed
_IN_STRING = re.compile(r'["\\]')
_BETWEEN = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_SPACES = re.compile(r"\s*")


@cache
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def ignore(text: str) -> None:
    """Drop a text."""


class Source:
    """The text of one sequence, of which a parser consumes the beginning.

    Attributes:
        ended: no text follows.
        work: characters that were looked at, for tests of the cost.
    """

    __slots__ = ("_at", "_text", "ended", "work")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        self.work = 0

    def feed(self, text: str) -> None:
        """Append a piece of text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def back(self, count: int) -> None:
        """Take back the last ``count`` consumed characters, all of which came with a tag."""
        self._at -= count

    def until(self, tags: tuple[str, ...], emit: Emit, *, cut: Emit | None = None) -> Found:
        """Consume text up to and including the first of ``tags``, and return this tag.

        The result is "" if the text ends before. No tag may be the beginning of another one.

        Args:
            tags: tags to look for.
            emit: function that gets the text before the tag, in pieces.
            cut: function that gets the beginning of a tag at the end of the text; None: ``emit``.
        """
        while True:
            found = self._search(_pattern(tags))
            if found is not None:
                self._pass(found.start(), emit)
                self._at = found.end()
                return found.group()
            self._pass(len(self._text) - self._partial(tags), emit)
            if self.ended:
                self._pass(len(self._text), cut or emit)
                return ""
            yield

    def until_match(self, pattern: re.Pattern[str], partial: re.Pattern[str], emit: Emit) -> Found:
        """Consume text up to and including the first match, and return it; see :meth:`until`.

        Args:
            pattern: pattern of what is looked for.
            partial: pattern of a bounded text at the end that may begin a match.
            emit: function that gets the text before the match, in pieces.
        """
        while True:
            found = self._search(pattern)
            if found is not None:
                self._pass(found.start(), emit)
                self._at = found.end()
                return found.group()
            found = self._search(partial)
            self._pass(len(self._text) if found is None else found.start(), emit)
            if self.ended:
                self._pass(len(self._text), emit)
                return ""
            yield

    def rest(self, emit: Emit) -> Steps:
        """Consume all text up to its end and emit it."""
        while True:
            self._pass(len(self._text), emit)
            if self.ended:
                return
            yield

    def _search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the next match of a pattern in the text that has arrived."""
        found = pattern.search(self._text, self._at)
        self.work += (len(self._text) if found is None else found.end()) - self._at
        return found

    def _pass(self, end: int, emit: Emit) -> None:
        """Consume the text up to the position ``end`` and emit it."""
        if end > self._at:
            emit(self._text[self._at : end])
            self._at = end

    def _partial(self, tags: tuple[str, ...]) -> int:
        """Return the number of characters at the end of the text that may begin a tag."""
        longest = min(max(map(len, tags)) - 1, len(self._text) - self._at)
        for length in range(longest, 0, -1):
            if any(tag.startswith(self._text[-length:]) for tag in tags if len(tag) > length):
                return length
        return 0

    def next(self, emit: Emit = ignore) -> Found:
        """Consume white space and return the character behind it; "" at the end of the text.

        ``emit`` gets the white space. The character is not consumed.
        """
        while True:
            found = _SPACES.match(self._text, self._at)
            self._pass(found.end() if found is not None else self._at, emit)
            if self._at < len(self._text):
                return self._text[self._at]
            if self.ended:
                return ""
            yield

    def begins_with(self, beginnings: Sequence[str]) -> Generator[None, None, bool]:
        """Return whether the text begins with one of some texts, and consume nothing.

        White space counts in neither; only the first PEEKED characters are regarded.
        """
        while True:
            head = "".join(self._text[self._at : self._at + PEEKED].split())
            self.work += PEEKED
            if any(head.startswith(one) for one in beginnings):
                return True
            complete = self.ended or len(self._text) - self._at >= PEEKED
            if complete or not any(one.startswith(head) for one in beginnings):
                return False
            yield

    def peek(self, count: int) -> Found:
        """Return the next ``count`` characters, fewer at the end of the text; consume nothing."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        self.work += count
        return self._text[self._at : self._at + count]

    def word(self, pattern: re.Pattern[str]) -> Found:
        """Return the characters of a word that are next, at most PEEKED; consume nothing.

        ``pattern``: the pattern of a word, also of no characters.
        """
        while True:
            found = pattern.match(self._text, self._at, self._at + PEEKED)
            end = self._at if found is None else found.end()
            self.work += end - self._at
            if end < len(self._text) or end - self._at == PEEKED or self.ended:
                return self._text[self._at : end]
            yield

    @property
    def more(self) -> bool:
        """True if text has arrived that is not consumed."""
        return self._at < len(self._text)

    def skip(self, count: int) -> None:
        """Consume characters that ``peek`` or ``word`` returned."""
        self._at += count

    def take(self) -> None:
        """Consume the character that ``next`` returned."""
        self._at += 1

    def json(self, emit: Emit) -> Generator[None, None, bool]:
        """Consume a JSON value and emit it as it is, in pieces; return whether it is complete.

        The position is at the value's first character. Only strings and brackets are regarded:
        within them, the value need not be valid. No stack is kept, so nesting costs no memory.
        """
        depth = 0
        quoted = False
        first = yield from self.next()
        if first not in ('"', "{", "["):
            return (yield from self._scalar(emit))
        while True:
            found = self._search(_IN_STRING if quoted else _BETWEEN)
            if found is None or (found.group() == "\\" and found.end() == len(self._text)):
                # a backslash at the end stays in the source until its character has arrived
                self._pass(len(self._text) if found is None else found.start(), emit)
                if self.ended:
                    self._pass(len(self._text), emit)
                    return False
                yield
                continue
            mark = found.group()
            if mark == "\\":
                self._pass(found.end() + 1, emit)
                continue
            self._pass(found.end(), emit)
            if mark == '"':
                quoted = not quoted
            else:
                depth += 1 if mark in "{[" else -1
            if not quoted and depth <= 0:
                return True

    def _scalar(self, emit: Emit) -> Generator[None, None, bool]:
        """Consume a number or a word and emit it; return whether something follows it."""
        while True:
            found = self._search(_SCALAR_END)
            self._pass(len(self._text) if found is None else found.start(), emit)
            if found is not None or self.ended:
                return found is not None
            yield
