"""Tables of measurements from which plans choose: the search for one, its conditions and its rows.

A table is a JSON object. Its part ``measured`` has the conditions of the measurement, by which a
plan recognises the table as its own. Every other part maps sizes to a measured number for each way
that was compared: ``{size: {way: number}}``. The files are found as other tuned tables are
(:mod:`glowplug.kernels.launch.tuned_tables`). No torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import NoTable

MEASURED = "measured"  #: part with the conditions
MOST_DIGITS = 18  #: digits of a size
Rows = Mapping[int, Mapping[str, float]]  #: size -> way -> number
Table = TypeVar("Table")


@dataclass(frozen=True)
class Found(Generic[Table]):
    """The table of a plan.

    Attributes:
        table: the table; None if there is none.
        why: source of the measurements, or the reason why there are none, for the plan.
    """

    table: Table | None
    why: str


def first_fitting(name: str, about: str, read: Callable[[Path], Table]) -> Found[Table]:
    """Return the table ``name`` from the first folder whose file ``read`` accepts.

    A file for which ``read`` raises NoTable is passed over, and the reason says so.

    Args:
        name: file name.
        about: conditions that the reason states.
        read: function from a path to the table in the file.
    """
    bad = ""
    for folder in tuned_tables.folders():
        path = folder / name
        if path.is_file():
            try:
                return Found(read(path), f"measured on {about}{bad}")
            except NoTable as error:
                bad += f"; ignored: {error}"
    return Found(None, f"no table for {about}{bad}")


def check_conditions(path: Path, contents: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise NoTable if the table in the file ``path`` was measured under other conditions.

    Args:
        path: the file, for the message.
        contents: the table.
        wanted: the conditions that it must state.
    """
    stated = contents.get(MEASURED, {})
    for name, value in wanted.items():
        if stated.get(name) != value:
            raise NoTable(f"{path} states {name} {stated.get(name)!r}, not {value!r}")


def rows(path: Path, contents: Mapping[str, Any], part: str, what: str) -> Rows:
    """Return one part of the table in the file ``path``, in ascending order of sizes.

    Args:
        path: the file, for the message.
        contents: the table.
        part: name of the part; {} if the table lacks it.
        what: what the table is of, for the message.

    Raises:
        NoTable: a size or a measurement is no positive number.
    """
    found: dict[int, Mapping[str, float]] = {}
    for size, row in contents.get(part, {}).items():
        counts = size.isdecimal() and len(size) <= MOST_DIGITS and int(size) > 0
        fits = counts and isinstance(row, dict)
        if not fits or not all(map(_is_positive, row.values())):
            raise NoTable(f"{path} is no table of {what}: {part} of {size[:MOST_DIGITS]}")
        found[int(size)] = row
    return dict(sorted(found.items()))


def _is_positive(value: Any) -> bool:
    """Return whether ``value`` is a positive number that a float can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


def write(path: Path, measured: Mapping[str, Any], parts: Mapping[str, Rows]) -> None:
    """Write a table atomically.

    Args:
        path: the file, see ``tuned_tables.path_to_write``.
        measured: the conditions.
        parts: rows by part.
    """
    sized = {
        name: {str(size): dict(row) for size, row in sorted(found.items())}
        for name, found in parts.items()
    }
    tuned_tables.write(path, {MEASURED: dict(measured), **sized})
