"""Line numbers of the keys of TOML and JSON texts.

The texts must be well formed: the callers have parsed them before.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_TOML_PART = re.compile(_PART)
_TOML_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_TOML_TABLE = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\n')


def _parts(key: str) -> list[str]:
    """Return the parts of a dotted TOML key, without their quotes."""
    return [part.strip("\"'") for part in _TOML_PART.findall(key)]


def toml_lines(text: str) -> dict[str, int]:
    """Return the line number of every key of a TOML text, by dotted path.

    Items of ``[[lists]]`` have their index in the path. Keys of inline tables are left out:
    their table's line stands for them.
    """
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix: list[str] = []
    open_until = ""  # the delimiter that ends the open multi-line string
    depth = 0  # number of brackets open at the start of the line
    for number, line in enumerate(text.split("\n"), 1):
        if not open_until and not depth:
            table = _TOML_TABLE.match(line)
            key = _TOML_KEY.match(line)
            if table and not key:
                prefix = _table(table, counts)
                lines.setdefault(".".join(prefix), number)
            elif key:
                path = [*prefix, *_parts(key[1])]
                lines[".".join(path)] = number
                line = line[key.end() :]
            else:
                continue
        open_until, depth = _scan(line, open_until, depth)
    return lines


def _table(match: re.Match[str], counts: dict[str, int]) -> list[str]:
    """Return the path, in parts, of the table that a ``[table]`` or ``[[table]]`` header opens.

    Args:
        match: the header.
        counts: index of the last item of each list, by dotted path; updated here.
    """
    path: list[str] = []
    parts = _parts(match[2])
    for i, part in enumerate(parts):
        path.append(part)
        name = ".".join(path)
        if i == len(parts) - 1 and match[1] == "[[":
            counts[name] = counts.get(name, -1) + 1
        if name in counts:
            path.append(str(counts[name]))
    return path


def _scan(line: str, open_until: str, depth: int) -> tuple[str, int]:
    """Scan one line of a TOML text and return the state after it.

    Args:
        line: the line.
        open_until: delimiter that ends the multi-line string open before the line; "" if none is
            open.
        depth: number of brackets open before the line.

    Returns:
        ``open_until`` and ``depth`` for the next line.
    """
    at = 0
    while at < len(line):
        if open_until:
            end = line.find(open_until, at)
            if end < 0:
                return (open_until, depth) if len(open_until) == 3 else ("", depth)
            at = end + len(open_until)
            open_until = ""
            continue
        char = line[at]
        if line.startswith(('"""', "'''"), at):
            open_until = line[at : at + 3]
            at = at + 3
        elif char in "\"'":
            at = _end_of_string(line, at)
        elif char == "#":
            break
        else:
            depth += (char in "[{") - (char in "]}")
            at += 1
    return open_until, depth


def _end_of_string(line: str, at: int) -> int:
    """Return the index after the end of the one-line string that begins at index ``at``."""
    quote = line[at]
    at += 1
    while at < len(line) and line[at] != quote:
        at += 2 if quote == '"' and line[at] == "\\" else 1
    return at + 1


def json_lines(text: str) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Return the line of each key of a JSON text by dotted path, and (key, line) of duplicates."""
    scan = _JsonScan()
    for match in _JSON_TOKEN.finditer(text):
        scan.take(match[0])
    return scan.lines, scan.duplicates


@dataclass
class _Open:
    """An open object or list in a JSON text.

    Attributes:
        path: dotted path of the object or list.
        number: index of the current item of a list; None for an object.
        keys: keys of the object that have occurred so far.
    """

    path: str
    number: int | None
    keys: set[str] = field(default_factory=set)

    def inner(self, key: str) -> str:
        """Return the path of the item ``key`` of an object, or of the current item of a list."""
        name = key if self.number is None else str(self.number)
        return f"{self.path}.{name}" if self.path else name


class _JsonScan:
    """A scan over the tokens of a JSON text.

    Attributes:
        lines: line of each key, by dotted path.
        duplicates: (dotted path, line) of every repetition of a key within its object.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.duplicates: list[tuple[str, int]] = []
        self._open: list[_Open] = []
        self._line = 1
        self._key = ""
        self._last = ""  # the last token other than a line break

    def take(self, token: str) -> None:
        """Process the next token of the text."""
        if token == "\n":
            self._line += 1
            return
        inside = self._open[-1] if self._open else None
        if token == ":" and inside is not None and inside.number is None:
            self._add_key(inside, json.loads(self._last))
        elif token in "{[":
            path = inside.inner(self._key) if inside is not None else ""
            if path:
                self.lines.setdefault(path, self._line)
            self._open.append(_Open(path, None if token == "{" else 0))
        elif token in "}]":
            self._open.pop()
        elif token == "," and inside is not None and inside.number is not None:
            inside.number += 1
        self._last = token

    def _add_key(self, inside: _Open, key: str) -> None:
        """Record the line of ``key`` in the object ``inside``, and whether it is a duplicate."""
        self._key = key
        path = inside.inner(key)
        if key in inside.keys:
            self.duplicates.append((path, self._line))
        inside.keys.add(key)
        self.lines[path] = self._line
