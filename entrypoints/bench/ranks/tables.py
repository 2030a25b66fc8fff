"""Tables of measured exchanges between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glowplug.entrypoints.bench.others import report


def show(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text: a table for each operation and axis, providers side by side.

    A cell has microseconds and, where it is known, the bus bandwidth in GB/s.
    """
    parts = []
    for operation, axis, ranks in dict.fromkeys(map(_table_of, rows)):
        here = [row for row in rows if _table_of(row) == (operation, axis, ranks)]
        parts.append(f"{operation}, {ranks} ranks along {axis}\n\n{_table(here)}")
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of one operation as a table, with a line for each size."""
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    columns = [column for name in providers for column in _columns(name, rows)]
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in rows:
        found.setdefault((row["tokens"], row["bytes"]), {}).update(_cells(row))
    lines = [
        [tokens or "-", size, *(cells.get(column, "-") for column in columns)]
        for (tokens, size), cells in sorted(found.items())
    ]
    return report.table(["tokens", "bytes", *columns], lines)


def _table_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return (operation, axis, ranks), which name the row's table."""
    return row["operation"], row["axis"], row["ranks"]


def _columns(provider: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the provider's columns; without bandwidth if no row of the provider has one."""
    known = any(row["gb_s"] for row in rows if row["provider"] == provider)
    return [f"{provider} us"] + ([f"{provider} GB/s"] if known else [])


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column."""
    name = row["provider"]
    time = f"{row['us']:.1f}"
    if not row["captured"]:
        time += " e"
    found = {f"{name} us": time}
    if row["gb_s"]:
        found[f"{name} GB/s"] = f"{row['gb_s']:.1f}"
    return found
