"""The rows of an ablation: a grid, one change at a time from a base, or the lines of a file.

A row is a mapping from techniques to values; the base has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

BASE = "base"  #: label of the row without settings
Settings = dict[str, str]


def label(settings: Mapping[str, str]) -> str:
    """Return a row's settings as text, ``graphs=off nextn=1``; ``base`` if there are none."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or BASE


def parse_row(text: str) -> Settings:
    """Return the settings of a line such as ``graphs=off nextn=1``; ``base`` has none.

    Raises:
        ValueError: a word is not ``TECHNIQUE=VALUE``, or a technique is set twice.
    """
    found: Settings = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if word == BASE:
            continue
        if not equals or not name or not value:
            raise ValueError(f"expected TECHNIQUE=VALUE, not {word!r}")
        if name in found:
            raise ValueError(f"{name} is set twice in {text.strip()!r}")
        found[name] = value
    return found


def read_rows(path: Path) -> list[Settings]:
    """Return the rows of a file, one a line; ``#`` starts a comment.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a row, or there is none.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
    try:
        found = [parse_row(line) for line in lines if line]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no row")
    return unique(found)


def parse_vary(word: str) -> tuple[str, tuple[str, ...]]:
    """Return (technique, values) of ``TECHNIQUE=VALUE,VALUE``; ``TECHNIQUE`` has no values yet.

    Raises:
        ValueError: a value is empty.
    """
    name, equals, text = word.partition("=")
    values = tuple(text.split(",")) if equals else ()
    if not name or "" in values:
        raise ValueError(f"expected TECHNIQUE or TECHNIQUE=VALUE,VALUE, not {word!r}")
    return name, values


def one_at_a_time(vary: Mapping[str, Sequence[str]]) -> list[Settings]:
    """Return the base, then a row for each value of each technique, the others as in the base."""
    return [{}, *({name: value} for name, values in vary.items() for value in values)]


def grid(vary: Mapping[str, Sequence[str]]) -> list[Settings]:
    """Return every combination of the values of all techniques; the last technique varies first."""
    return unique(dict(zip(vary, combination)) for combination in itertools.product(*vary.values()))


def unique(rows: Iterable[Settings]) -> list[Settings]:
    """Return the rows in order, each once."""
    return list({label(row): row for row in rows}.values())


def selected(text: str, count: int) -> list[int]:
    """Return the numbers of rows in a list such as ``1-4,7``, ascending.

    Args:
        text: numbers and ranges, from 1.
        count: number of rows.

    Raises:
        ValueError: a part is no range, or is outside the table.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"--rows {text}: expected numbers and ranges such as 1-4,7")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[0] < 1 or numbers[-1] > count:
            raise ValueError(f"--rows {text}: there are rows 1 to {count}")
        found.update(numbers)
    return sorted(found)
