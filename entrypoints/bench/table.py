"""``glowplug bench table``: the concurrency table, or that of static batches, of one or several
result files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

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


#: of `bench one-batch`, ours or SGLang's
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
BATCH = BATCH_COLUMNS[:3]  #: what tells its records from each other
#: SGLang's key, in seconds or tokens a second, and how many of ours it is
SGLANG = {
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
        help="files of `glowplug bench serving --output-file`, or of "
        "`bench one-batch --result-filename` or `--save`",
    )
    parser.add_argument("--columns", nargs="+", help="record keys to show")


def run(args: argparse.Namespace) -> int:
    """Prints one table a file and kind of record; with two files also the changes from the first to
    the second, in percent. Exit status 2 where a file holds anything else."""
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
    """Records of a JSON-lines file, or the results of a document, ordered by concurrency.
    ValueError.
    """
    text = path.read_bytes()
    try:
        whole = orjson.loads(text)
        records = whole["results"] if isinstance(whole, dict) and "results" in whole else [whole]
    except orjson.JSONDecodeError:
        records = _lines(path, text)
    if not records or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} holds no record")
    return sorted(records, key=lambda record: record.get("max_concurrency") or 0)


def _lines(path: Path, text: bytes) -> list[Any]:
    try:
        return [orjson.loads(line) for line in text.splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON, nor lines of it: {error}") from None


def by_columns(
    path: Path, records: list[Record], asked: Sequence[str] | None
) -> dict[tuple[str, ...], list[Record]]:
    """Records by what is shown of them. ValueError where there is nothing to show of one, or with
    ``asked`` of any.
    """
    if asked:
        if all(set(cells(record, asked)) == {"-"} for record in records):
            raise ValueError(f"{path}: no record has any of {', '.join(asked)}")
        return {tuple(asked): records}
    found: dict[tuple[str, ...], list[Record]] = {}
    for number, record in enumerate(records, 1):
        columns = next(
            (kind for kind in (COLUMNS, BATCH_COLUMNS) if set(cells(record, kind)) != {"-"}), None
        )
        if columns is None:
            raise ValueError(
                f"{path}: record {number} is neither of serving nor of a static batch; it has "
                f"{', '.join(record) or 'no keys'}"
            )
        found.setdefault(columns, []).append(record)
    return found


def cells(record: Record, columns: Sequence[str]) -> list[object]:
    values = dict(record)
    tpot = values.get("mean_tpot_ms")
    if "per_user_throughput" not in values and tpot:
        values["per_user_throughput"] = 1e3 / tpot  # records that another tool wrote
    for name, (theirs, times) in SGLANG.items():
        if theirs in record:
            values.setdefault(name, record[theirs] * times)
    return ["-" if values.get(column) is None else values[column] for column in columns]


def changes(
    before: list[Record], after: list[Record], columns: Sequence[str]
) -> list[list[object]]:
    """One row for each concurrency, or each shape of a batch, that both have."""
    second = {_point(record): record for record in after}
    rows = []
    for record in before:
        if _point(record) in second:
            pairs = zip(columns, cells(record, columns), cells(second[_point(record)], columns))
            rows.append(
                [
                    old if name in ("max_concurrency", *BATCH) else _percent(old, new)
                    for name, old, new in pairs
                ]
            )
    return rows


def _point(record: Record) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("max_concurrency", *BATCH))


def _percent(old: object, new: object) -> object:
    if isinstance(old, int | float) and isinstance(new, int | float) and old:
        return f"{(new / old - 1) * 100:+.1f}"
    return "-"
