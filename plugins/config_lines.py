"""Line numbers of the keys of TOML and JSON texts.

The texts must be well formed: the callers have parsed them before.
"""

from __future__ import annotations

import json
import re
from typing import Any

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_TOML_PART = re.compile(_PART)
_TOML_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_TOML_TABLE = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\n')


def _parts(key: str) -> list[str]:
    return [part.strip("\"'") for part in _TOML_PART.findall(key)]


def toml_lines(text: str) -> dict[str, int]:
    """Return the line of every key of a TOML text, by dotted path.

    Items of ``[[lists]]`` have their number in the path. Keys of inline tables have the line of
    their table.
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
    """Return the path that a ``[table]`` or ``[[table]]`` header opens.

    Args:
        match: the header.
        counts: number of the last item by list; updated here.
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
    """Return the state of the scan after ``line``.

    Returns:
        (delimiter that ends the open multi-line string, "" if none is open; number of open
        brackets).
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
    quote = line[at]
    at += 1
    while at < len(line) and line[at] != quote:
        at += 2 if quote == '"' and line[at] == "\\" else 1
    return at + 1


def json_lines(text: str) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Return (line by dotted path, duplicate keys with their lines) of a JSON text."""
    lines: dict[str, int] = {}
    twice: list[tuple[str, int]] = []
    stack: list[Any] = []  # [path, next item's number or None for an object, keys seen]
    line = 1
    pending = ""
    key = ""
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token == ":" and stack and stack[-1][1] is None:
            key = json.loads(pending)
            path = f"{stack[-1][0]}.{key}" if stack[-1][0] else key
            if key in stack[-1][2]:
                twice.append((path, line))
            stack[-1][2].add(key)
            lines[path] = line
        elif token in "{[":
            path = _value_path(stack, key)
            if path:
                lines.setdefault(path, line)
            stack.append([path, None if token == "{" else 0, set()])
        elif token in "}]":
            stack.pop()
        elif token == "," and stack and stack[-1][1] is not None:
            stack[-1][1] += 1
        pending = token if token != "\n" else pending
    return lines, twice


def _value_path(stack: list[Any], key: str) -> str:
    if not stack:
        return ""
    path, number, _ = stack[-1]
    name = key if number is None else str(number)
    return f"{path}.{name}" if path else name
