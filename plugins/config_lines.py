"""Which line each key of a TOML or JSON text stands on. The texts are known to be well formed."""

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
    """Line by dotted path; items of ``[[lists]]`` by number. Keys of inline tables share their
    table's line.
    """
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix: list[str] = []
    open_until = ""  # what ends the multi-line string that we are in
    depth = 0  # of brackets open at the start of the line
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
    """The path that a ``[table]`` or ``[[table]]`` header opens; list items are counted in
    ``counts``.
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
    """State after ``line``: the ending of an open multi-line string, and how many brackets are
    open.
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
    """(line by dotted path, duplicate keys with their lines) of a JSON text."""
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
