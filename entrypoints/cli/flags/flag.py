"""A flag, and a flag as given on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VALUE_CHARS_MAX = 200  #: longest part of a flag's value that messages show
Convert = Callable[[str], Any]


@dataclass(frozen=True)
class Flag:
    """A command-line flag and the configuration field that it sets.

    Attributes:
        names: spellings; underscores count as hyphens.
        path: dotted field; ``parallel[tensor].size`` is the field ``size`` of the item of the list
            ``parallel`` whose ``use`` is "tensor".
        help: description for ``--help``.
        convert: conversion of the text on the command line; None for a switch.
        value: value that a switch sets.
        also: further fields that the flag sets, by path.
        values: translation of other engines' names for a value into this engine's value.
        many: whether the flag takes several values.
    """

    names: tuple[str, ...]
    path: str
    help: str
    convert: Convert | None = str
    value: Any = True
    also: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    many: bool = False


@dataclass(frozen=True)
class GivenFlag:
    """A flag as given on a command line.

    Attributes:
        flag: the flag.
        spelling: the name under which it was given.
        value: its converted value; of a switch, the value that the switch sets.
    """

    flag: Flag
    spelling: str
    value: Any

    @property
    def config_value(self) -> Any:
        """The flag's value in the configuration, where another engine's name is translated."""
        if isinstance(self.value, str):
            return self.flag.values.get(self.value, self.value)
        return self.value

    @property
    def text(self) -> str:
        """The flag and its value for messages; the value of an API key is left out."""
        if self.flag.convert is None or self.flag.path.endswith("api_key"):
            return self.spelling
        return f"{self.spelling} {_shortened(self.value)}"


def _shortened(value: Any) -> str:
    """Convert a value to one line of at most VALUE_CHARS_MAX characters."""
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(words.split())
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "..."


def byte_count(text: str) -> int:
    """Parse a number of bytes such as "1000", "25G" or "1.5g".

    Capital letters are powers of 1024, small letters powers of 1000.

    Raises:
        ValueError: the text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise ValueError(text)
    number, unit = match.groups()
    base = 1024.0 if unit.isupper() else 1000.0
    power = " kmgt".index(unit.lower() or " ")
    return round(float(number) * float(base**power))


def count_or_auto(text: str) -> int | str:
    """Parse a whole number, or "auto".

    Raises:
        ValueError: the text is neither.
    """
    return text if text == "auto" else int(text)


def text_list(text: str) -> list[str]:
    """Parse a JSON list of strings.

    Raises:
        ValueError: the text is not a JSON list of strings.
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(text)
    return found


def switch(names: str, path: str, value: Any, help: str, **more: Any) -> Flag:
    """Return a flag that takes no value. ``names``: its spellings, separated by blanks."""
    return Flag(tuple(names.split()), path, help, convert=None, value=value, **more)
