"""Reading of question files, with the line of each error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


def read_lines(path: Path, keys: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Read a JSON-lines file of objects that have texts under ``keys``.

    Blank lines are left out.

    Returns:
        ("FILE:LINE", object) of each line.

    Raises:
        ValueError: the file cannot be read, has no line, or a line is malformed.
    """
    found = []
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if line.strip():
            place = f"{path}:{number}"
            found.append((place, checked(_parsed(line, place), keys, place)))
    if not found:
        raise ValueError(f"{path} has no questions")
    return found


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def checked(value: Any, keys: tuple[str, ...], place: str) -> dict[str, Any]:
    """Return ``value`` if it is an object that has texts under ``keys``.

    Args:
        value: a JSON value.
        keys: the required keys.
        place: "FILE:LINE" or "FILE, entry N", for errors.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{place}: not a JSON object but {_kind(value)}")
    for key in keys:
        if not isinstance(value.get(key), str) or not value[key]:
            held = "is missing" if key not in value else f"is {_kind(value[key])}"
            raise ValueError(f'{place}: "{key}" {held}; it must be a text')
    return value


def _parsed(line: bytes, place: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None


def _kind(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    if value == "":
        return "an empty text"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")
