"""Output of results: aligned lines, tables, JSON and JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 50  #: columns of a printed line
#: (label, key) of the figures of a serving run that are no times of single requests
TOTALS = (
    ("Traffic request rate", "request_rate"),
    ("Max request concurrency", "max_concurrency"),
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Total generated tokens (retokenized)", "total_output_tokens_retokenized"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Input token throughput (tok/s)", "input_throughput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Concurrency", "concurrency"),
    ("Output throughput per user (tok/s)", "per_user_throughput"),
    ("Output throughput of a request (tok/s)", "mean_request_output_throughput"),
    ("Accept length", "accept_length"),
    ("Accept rate by position", "accept_rates"),
    ("Device idle between steps, share", "device_idle_share"),
    ("Compile time since start-up (s)", "compile_seconds"),
)


def heading(title: str, char: str = "=") -> str:
    return f"{f' {title} ':{char}^{WIDTH}}"


def line(label: str, value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        shown = ", ".join(f"{one:.2f}" for one in value)
    elif isinstance(value, float):
        shown = f"{value:.{4 if 'share' in label else 2}f}"
    else:
        shown = str(value)
    return f"{label + ':':<40}{shown:>{WIDTH - 40}}"


def serving_report(
    record: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> str:
    """Return the text block that is printed after a serving run."""
    rows = [heading("Serving Benchmark Result"), line("Backend", record["backend"])]
    rows += [line(label, record[key]) for label, key in TOTALS if record.get(key) is not None]
    titles = {
        "e2el": "End-to-End Latency",
        "ttft": "Time to First Token",
        "tpot": "Time per Output Token",
        "itl": "Inter-Token Latency",
    }
    for metric in metrics:
        rows.append(heading(titles[metric], "-"))
        keys = [
            ("Mean", "mean"),
            ("Median", "median"),
            ("Std", "std"),
            *((f"P{percentile:g}", f"p{percentile:g}") for percentile in percentiles),
            ("Max", "max"),
        ]
        rows += [
            line(f"{label} {metric.upper()} (ms)", record[f"{key}_{metric}_ms"])
            for label, key in keys
        ]
    return "\n".join([*rows, "=" * WIDTH])


def idle_share(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return the share of the steps' time, between two snapshots, that the device was idle.

    Args:
        before: the engine's statistics at the first snapshot.
        after: the engine's statistics at the second.

    Returns:
        The share, 0 to 1; None if the engine does not report it.
    """
    if "bubble_seconds" not in after:
        return None
    steps = after["step_seconds"] - before.get("step_seconds", 0.0)
    return (
        float((after["bubble_seconds"] - before.get("bubble_seconds", 0.0)) / steps)
        if steps > 0
        else None
    )


def startup_times(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's keys of an engine's start-up.

    They are the seconds of each phase, and the seconds in compilers until now, in the phases and
    since. Other engines do not report them: None.

    Args:
        info: the engine's reply to the control "info".
    """
    return {key: info.get(key) for key in ("startup_seconds", "compile_seconds")}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns; floats have three decimals."""
    cells = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [
        max(len(column), *(len(row[i]) for row in cells), 3) for i, column in enumerate(columns)
    ]
    lines = [
        [column.ljust(width) for column, width in zip(columns, widths)],
        ["-" * width for width in widths],
    ]
    lines += [[cell.rjust(width) for cell, width in zip(row, widths)] for row in cells]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def plain(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as strings, since JSON cannot represent them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(dict(record))) + "\n")


def write_json(path: Path, record: Any) -> None:
    """Write ``record`` as JSON, replacing an existing file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(plain(record), indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
