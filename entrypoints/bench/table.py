"""``glowplug bench table``: the concurrency table of one or several result files, side by side."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench import report

COLUMNS = ("max_concurrency", "input_throughput", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
           "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "per_user_throughput")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="files of `glowplug bench serving --output-file`")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), help="record keys to show")


def run(args: argparse.Namespace) -> int:
    """Prints one table a file; with two files also the change from the first to the second, in percent."""
    try:
        loaded = [read(path) for path in args.files]
    except (OSError, ValueError) as error:
        print(f"glowplug bench table: {error}", file=sys.stderr)
        return 2
    for path, records in zip(args.files, loaded):
        print(f"{path}\n{report.table(args.columns, [cells(record, args.columns) for record in records])}\n")
    if len(loaded) == 2:
        print(f"change in percent\n{report.table(args.columns, changes(loaded[0], loaded[1], args.columns))}")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file, ordered by concurrency."""
    records = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    return sorted(records, key=lambda record: record.get("max_concurrency") or 0)


def cells(record: dict[str, Any], columns: list[str]) -> list[object]:
    values = dict(record)
    tpot = values.get("mean_tpot_ms")
    if "per_user_throughput" not in values and tpot:
        values["per_user_throughput"] = 1e3 / tpot  # records that another tool wrote
    return ["-" if values.get(column) is None else values[column] for column in columns]


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]], columns: list[str]) -> list[list[object]]:
    """One row for each concurrency that both have."""
    second = {record.get("max_concurrency"): record for record in after}
    rows = []
    for record in before:
        level = record.get("max_concurrency")
        if level in second:
            pairs = zip(columns, cells(record, columns), cells(second[level], columns))
            rows.append([level if name == "max_concurrency" else _percent(old, new) for name, old, new in pairs])
    return rows


def _percent(old: object, new: object) -> object:
    if isinstance(old, int | float) and isinstance(new, int | float) and old:
        return f"{(new / old - 1) * 100:+.1f}"
    return "-"
