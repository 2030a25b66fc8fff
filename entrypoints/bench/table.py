"""``glowplug bench table``: tables of the results in one or several files.

A file has results by concurrency, or of static batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.metrics import per_user_throughput
from glowplug.entrypoints.bench.others import report

COLUMNS = (
    "max_concurrency",
    "input_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "per_user_throughput",
)


#: columns for `bench one-batch`, ours or SGLang's
BATCH_COLUMNS = (
    "batch_size",
    "input_len",
    "output_len",
    "prefill_ms",
    "prefill_tokens_per_s",
    "decode_median_ms",
    "decode_tokens_per_s",
    "floor_share",
)
BATCH_KEYS = BATCH_COLUMNS[:3]  #: keys that identify a record of a static batch
#: our key -> (SGLang's key in seconds or tokens a second, factor to our unit)
SGLANG_KEYS = {
    "prefill_ms": ("prefill_latency", 1e3),
    "prefill_tokens_per_s": ("prefill_throughput", 1),
    "decode_median_ms": ("median_decode_latency", 1e3),
    "decode_tokens_per_s": ("median_decode_throughput", 1),
}

Record = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="result files of `glowplug bench serving --output-file`, or of "
        "`bench one-batch --result-filename` or `--save`",
    )
    parser.add_argument("--columns", nargs="+", help="keys of the records to show")


def run(args: argparse.Namespace) -> int:
    """Print one table per file and kind of record.

    For two files, also print the changes from the first to the second in percent.

    Returns:
        Exit status 0; 2 if a file has something other than results.
    """
    try:
        loaded = [by_columns(path, read(path), args.columns) for path in args.files]
    except (OSError, ValueError) as error:
        print(f"glowplug bench table: {error}", file=sys.stderr)
        return 2
    for path, tables in zip(args.files, loaded):
        for columns, records in tables.items():
            print(
                f"{path}\n{report.table(columns, [cells(record, columns) for record in records])}\n"
            )
    if len(loaded) == 2:
        for columns in filter(loaded[1].__contains__, loaded[0]):
            rows = changes(loaded[0][columns], loaded[1][columns], columns)
            print(f"change in percent\n{report.table(columns, rows)}")
    return 0


def read(path: Path) -> list[Record]:
    """Read the records of a JSON-lines file, or of a JSON document, ordered by concurrency.

    Raises:
        ValueError: the file has no record.
    """
    text = path.read_bytes()
    try:
        whole = orjson.loads(text)
        records = whole["results"] if isinstance(whole, dict) and "results" in whole else [whole]
    except orjson.JSONDecodeError:
        records = _lines(path, text)
    if not records or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} has no record")
    return sorted(records, key=lambda record: record.get("max_concurrency") or 0)


def _lines(path: Path, text: bytes) -> list[Any]:
    try:
        return [orjson.loads(line) for line in text.splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is neither JSON nor JSON lines: {error}") from None


def by_columns(
    path: Path, records: list[Record], requested: Sequence[str] | None
) -> dict[tuple[str, ...], list[Record]]:
    """Group records into tables by their kind; the keys are the columns of each table.

    With ``requested``, all records are in one table with these columns.

    Raises:
        ValueError: a record has none of the known columns; with ``requested``: no record has any
            of the requested columns.
    """
    if requested:
        if all(set(cells(record, requested)) == {"-"} for record in records):
            raise ValueError(f"{path}: no record has any of {', '.join(requested)}")
        return {tuple(requested): records}
    found: dict[tuple[str, ...], list[Record]] = {}
    for number, record in enumerate(records, 1):
        columns = next(
            (kind for kind in (COLUMNS, BATCH_COLUMNS) if set(cells(record, kind)) != {"-"}), None
        )
        if columns is None:
            raise ValueError(
                f"{path}: record {number} is not of `bench serving` or `bench one-batch`; it has "
                f"{', '.join(record) or 'no keys'}"
            )
        found.setdefault(columns, []).append(record)
    return found


def cells(record: Record, columns: Sequence[str]) -> list[object]:
    """Return the values of a record in the given columns; "-" where there is none."""
    values = dict(record)
    # computed anew: records of other tools lack it, and older ones of ours have 1000 / TPOT
    values["per_user_throughput"] = per_user_throughput(record)
    for name, (sglang_key, factor) in SGLANG_KEYS.items():
        if sglang_key in record:
            values.setdefault(name, record[sglang_key] * factor)
    return ["-" if values.get(column) is None else values[column] for column in columns]


def changes(
    before: list[Record], after: list[Record], columns: Sequence[str]
) -> list[list[object]]:
    """Return the changes in percent, a row for each concurrency or batch shape in both files."""
    second = {_point(record): record for record in after}
    rows = []
    for record in before:
        if _point(record) in second:
            pairs = zip(columns, cells(record, columns), cells(second[_point(record)], columns))
            rows.append(
                [
                    old if name in ("max_concurrency", *BATCH_KEYS) else _percent(old, new)
                    for name, old, new in pairs
                ]
            )
    return rows


def _point(record: Record) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("max_concurrency", *BATCH_KEYS))


def percent(old: object, new: object) -> float | None:
    """Return the change from ``old`` to ``new`` in percent; None if they are no numbers."""
    if isinstance(old, int | float) and isinstance(new, int | float) and old:
        return (new / old - 1) * 100
    return None


def _percent(old: object, new: object) -> str:
    change = percent(old, new)
    return "-" if change is None else f"{change:+.1f}"
