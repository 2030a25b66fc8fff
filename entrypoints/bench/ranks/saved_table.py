"""The table that ``bench kernels --collectives --save-table`` keeps, by which plans choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.core.facts.mesh import axis_size
from glowplug.entrypoints.bench.ranks.exchange_times import ALL_REDUCE, EXCHANGE
from glowplug.kernels.collectives import exchange_tables
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
    prefix = f"{record['chosen']} "
    times: dict[str, dict[int, dict[str, float]]] = {ALL_REDUCE: {}, EXCHANGE: {}}
    for row in record["rows"]:
        if row["ranks"] != ranks:
            continue
        provider = row["provider"]
        if row["operation"] == ALL_REDUCE:
            part, size, way = ALL_REDUCE, row["bytes"], provider
        elif row["operation"].startswith(EXCHANGE) and provider.startswith(prefix):
            part, size, way = EXCHANGE, row["tokens"], provider.removeprefix(prefix)
        else:
            continue
        known = times[part].setdefault(size, {})
        known[way] = min(row["us"], known.get(way, float("inf")))
    if not any(times.values()):
        return None
    path = tuned_tables.path_to_write(
        exchange_tables.file_name(record["gpu"], ranks, record["dtype"])
    )
    measured = {name: record[name] for name in KEPT if name in record}
    measured |= {"card": record["gpu"], "ranks": ranks}
    measured |= {"dtype": record["dtype"], "hidden": record["hidden"]}
    exchange_tables.write(path, measured, times)
    return path
