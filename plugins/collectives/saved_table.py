"""The table that ``bench kernels --collectives --save-table`` keeps, by which plans choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.core.facts.mesh import axis_size
from glowplug.kernels.collectives import exchange_tables
from glowplug.kernels.collectives.exchange_tables import ALL_REDUCE, EXCHANGE
from glowplug.kernels.launch import tuned_tables

#: conditions of a record that are kept in the table
KEPT = ("command", "date", "glowplug", "commit", "packages", "driver", "cuda", "model")


def save_table(record: Mapping[str, Any]) -> Path | None:
    """Write the table of a record of all ranks of a layout, and return its file.

    Sums are kept by provider. Exchanges of experts' tokens are kept by exchange, through the
    collectives that the plan chooses, each in its fastest format of the tokens.

    Returns:
        The file; None if the record has no such times.
    """
    ranks = axis_size("tp", record["mesh"])
    times: dict[str, dict[int, dict[str, float]]] = {ALL_REDUCE: {}, EXCHANGE: {}}
    for row in record["rows"]:
        part, size, way = _kept(row, record["chosen"])
        if way and row["ranks"] == ranks:
            known = times[part].setdefault(size, {})
            known[way] = min(row["us"], known.get(way, row["us"]))
    if not any(times.values()):
        return None
    card, dtype = record["gpu"], record["dtype"]
    path = tuned_tables.path_to_write(exchange_tables.file_name(card, ranks, dtype))
    measured = {"card": card, "ranks": ranks, "dtype": dtype, "hidden": record["hidden"]}
    exchange_tables.write(path, measured | _conditions(record), times)
    return path


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of a record that are kept."""
    return {name: record[name] for name in KEPT if name in record}


def _kept(row: Mapping[str, Any], chosen: str) -> tuple[str, int, str]:
    """Return (part, size, way) of a row in the table; the way is "" if the row has no place.

    ``chosen``: name of the plan's collectives.
    """
    provider: str = row["provider"]
    if row["operation"] == ALL_REDUCE:
        return ALL_REDUCE, row["bytes"], provider
    if row["operation"].startswith(EXCHANGE) and provider.startswith(f"{chosen} "):
        return EXCHANGE, row["tokens"], provider.removeprefix(f"{chosen} ")
    return "", 0, ""
