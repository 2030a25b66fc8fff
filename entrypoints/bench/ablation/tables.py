"""The tables of an ablation in Markdown, from its result file.

A cell has a number, or says why there is none: the number in brackets leads to the reason below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glowplug.entrypoints.bench.ablation.measure import SINGLE, START, level_phase
from glowplug.entrypoints.bench.ablation.record import (
    FAILED,
    LEFT_OUT,
    MEASURED,
    REFUSED,
    SAME,
)
from glowplug.entrypoints.bench.others import report

#: note below the table of single queries
SINGLE_NOTE = (
    "TPS@1: output tokens per second after the first. Memory of the first rank: without the KV "
    "cache + KV cache. Same answers: as those of the first row."
)
Record = Mapping[str, Any]
GIB = 1 << 30
NOT_RUN = "not run"
NOTHING = "-"  #: cell without a figure


class Reasons:
    """Numbered reasons below the tables."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, word: str, reason: str) -> str:
        """Return the text of a cell without a number: ``refused [1]``."""
        return f"{word} [{self._numbers.setdefault(reason, len(self._numbers) + 1)}]"

    def lines(self) -> list[str]:
        """Return the reasons as the lines of a list."""
        return [f"{number}. {' '.join(reason.split())}" for reason, number in self._numbers.items()]


def missing(row: Record, phase: str, reasons: Reasons) -> str:
    """Return the cell of a row without a result in ``phase``."""
    if row["status"] == REFUSED:
        return reasons.mark("refused", _refusal_text(row))
    failure = row.get("failure")
    if row["status"] != FAILED or failure is None:
        return "-"
    reason = f"{row['row']}, {failure['phase']}: {failure['reason']}"
    return reasons.mark(failure["kind"] if failure["phase"] in (phase, START) else NOT_RUN, reason)


def _refusal_text(row: Record) -> str:
    """Return every reason of a refusal with its fix."""
    return "; ".join(
        f"{one['field']}: {one['reason']} (fix: {one['fix']})" for one in row["refusals"]
    )


def used_columns(document: Record) -> list[tuple[str, str]]:
    """Return (name, title) of the techniques that a row of the table uses or sets."""
    rows = document["rows"]
    return [
        (name, title)
        for name, title in document["columns"]
        if any(row["cells"].get(name) or name in row["settings"] for row in rows)
    ]


def shown_rows(document: Record) -> list[tuple[int, Record]]:
    """Return (number, row) of the rows with results or reasons.

    Rows with the plan of another one are left out.
    """
    numbered = enumerate(document["rows"], 1)
    return [(at, row) for at, row in numbered if row["status"] not in (SAME, LEFT_OUT)]


def levels(document: Record) -> list[int]:
    """Return every concurrency of the rows, ascending."""
    return sorted({level for row in document["rows"] for level in row["load"]["levels"]})


def single_table(document: Record, reasons: Reasons) -> str:
    """Return the table of single queries."""
    techniques = used_columns(document)
    base = next((row for _, row in shown_rows(document) if row.get("single")), None)
    lines = []
    for number, row in shown_rows(document):
        cells = [row["cells"].get(name, "") for name, _ in techniques]
        lines.append([number, *cells, *_single_cells(row, base, reasons)])
    titles = ["TPS@1", "TTFT ms", "accept length", "start s", "memory GiB", "KV tokens"]
    heads = ["row", *(title for _, title in techniques), *titles, "same answers", "fingerprint"]
    return report.table(heads, lines)


def _single_cells(row: Record, base: Record | None, reasons: Reasons) -> list[str]:
    """Return the figures of a row in the table of single queries."""
    single = row.get("single")
    start = row.get("start_seconds")
    answers = single["answers"] if single else None
    same = "-" if not single or not base else _same(answers, base["single"]["answers"])
    return [
        f"{single['tokens_per_s']:.1f}" if single else missing(row, SINGLE, reasons),
        f"{single['ttft_ms']:.1f}" if single else "-",
        _rounded(single and single["accept_length"], 2),
        _rounded(start, 1),
        _memory_cell(row.get("memory")),
        str(row.get("kv_tokens") or "-"),
        same,
        row["fingerprint"] or "-",
    ]


def _same(one: object, other: object) -> str:
    return "yes" if one == other else "no"


def _rounded(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _memory_cell(memory: Record | None) -> str:
    """Return an engine's memory in GiB as ``without cache + cache``."""
    if not memory:
        return "-"
    return f"{memory['engine'] / GIB:.2f} + {memory['kv_cache'] / GIB:.2f}"


def offline_table(
    document: Record, reasons: Reasons, figures: Callable[[Record], str], whole: bool = False
) -> str:
    """Return a table with a column for each concurrency.

    Args:
        document: the result file.
        reasons: reasons of cells without a number.
        figures: the cell of a concurrency's record.
        whole: also show the rows without any number.
    """
    columns = levels(document)
    lines = []
    for number, row in shown_rows(document):
        if not whole and all(figures(one) == NOTHING for one in row.get("offline") or ()):
            continue
        found = {one["concurrency"]: one for one in row.get("offline") or ()}
        cells = [
            figures(found[level]) if level in found else _no_level(row, level, reasons)
            for level in columns
        ]
        lines.append([number, row["row"], *cells])
    return report.table(["row", "settings", *map(str, columns)], lines)


def _no_level(row: Record, level: int, reasons: Reasons) -> str:
    """Return the cell of a row that has no result at a concurrency."""
    if level not in row["load"]["levels"]:
        return "-"
    return missing(row, level_phase(level), reasons)


def throughput_cell(level: Record) -> str:
    """Return ``total (per request)`` tokens per second."""
    return f"{level['total_throughput']:.1f} ({level['request_decode_throughput']:.2f})"


def latency_cell(level: Record) -> str:
    """Return ``TTFT / TPOT``, medians in milliseconds."""
    return f"{level['median_ttft_ms']:.1f} / {level['median_tpot_ms']:.2f}"


def accept_cell(level: Record) -> str:
    return _rounded(level["accept_length"], 2)


def markdown(document: Record, record: str, figure: str | None) -> str:
    """Return the page of a table.

    Args:
        document: the result file.
        record: name of the file, for a link.
        figure: name of the chart's file; None: there is no chart.
    """
    reasons = Reasons()
    parts = ["# Ablation", _conditions(document, record)]
    if figure:
        parts.append(f"![throughput by row]({figure})")
    parts += ["## Single query", single_table(document, reasons), SINGLE_NOTE]
    if levels(document):
        parts += [
            "## Offline throughput",
            "Prompt and output tokens per second, by concurrency; in brackets the mean over "
            "requests of output tokens per second.",
            offline_table(document, reasons, throughput_cell, whole=True),
            "Medians of TTFT and TPOT in milliseconds, by concurrency.",
            offline_table(document, reasons, latency_cell),
        ]
        if any(one["accept_length"] for row in document["rows"] for one in row.get("offline", ())):
            parts += [
                "Accept length, by concurrency.",
                offline_table(document, reasons, accept_cell),
            ]
    parts += [*_notes(document), *_listed("Without a number", reasons.lines())]
    return "\n\n".join(parts) + "\n"


def _conditions(document: Record, record: str) -> str:
    """Return the sentence above the tables: model, card, versions, load and command."""
    load = document["load"]
    packages = ", ".join(f"{name} {version}" for name, version in document["packages"].items())
    prompts = (
        f"random prompts of {load['input_len']} tokens" if load["input_len"] else "text prompts"
    )
    loads = [row["load_average"] for row in document["rows"] if "load_average" in row]
    busy = f" Load average of the host: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    models = dict.fromkeys(Path(str(row["model"])).name for row in document["rows"])
    return (
        f"{', '.join(models)} on {document['card']}; glowplug {document['glowplug']} "
        f"({document['commit'] or 'no checkout'}), {packages}; {document['date'][:10]}. "
        f"{prompts[0].upper()}{prompts[1:]}, at most {load['output_len']} output tokens; a fresh "
        f"engine for each row.{busy} Record: [{record}]({record}).\n\n"
        f"    {document['command']}"
    )


def _notes(document: Record) -> list[str]:
    """Return the notes on rows with the same plan, left out, or measured with other versions."""
    rows = document["rows"]
    same = [f"{row['row']} ({row['same_as']})" for row in rows if row["status"] == SAME]
    left = [row["row"] for row in rows if row["status"] == LEFT_OUT]
    versions = {"versions": next(iter(rows))["versions"]} if rows else {}
    other = [
        str(number)
        for number, row in enumerate(rows, 1)
        if row["status"] == MEASURED and row["versions"] != versions.get("versions")
    ]
    return [
        f"{title}: {', '.join(names)}."
        for title, names in (
            ("Not measured, because the plan is that of the row in brackets", same),
            ("Not measured yet", left),
            ("Measured with other versions than the first row", other),
        )
        if names
    ]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(lines)] if lines else []
