"""Charts of servers under load: throughput against latency, a point for each concurrency.

Records: ``bench versus`` (``serving.json``), ``bench serving --output-file`` and ``bench sweep``.
"""

from __future__ import annotations

from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    Axes,
    Panel,
    Record,
    draw_floor,
    draw_line,
    plain_log,
    title_of,
)
from glowplug.entrypoints.bench.plots.serving_runs import Run, runs_of

FLOORS = "serving, output tokens/s"  #: table of `bench versus` with the floor of the throughput
LATENCIES = (
    ("mean_tpot_ms", "mean TPOT, ms", "serving, mean TPOT in ms"),
    ("mean_ttft_ms", "mean TTFT, ms", "serving, mean TTFT in ms"),
)
MARKS = "concurrency at the marks"


def latency_panels(record: Record) -> list[Panel]:
    """Return the panels of throughput against TPOT and against TTFT."""
    runs = runs_of(record)
    if not runs:
        return []
    return [
        Panel(title_of(record), _drawing(runs, record, key, label, table), MARKS)
        for key, label, table in LATENCIES
        if all(run[key] > 0 for every in runs.values() for run in every)
    ]


def _drawing(runs: dict[str, list[Run]], record: Record, key: str, label: str, table: str) -> Any:
    """Return the drawing of throughput against one latency.

    Args:
        runs: runs of each line.
        record: the whole record, which may have floors.
        key: key of the latency in a run.
        label: its name on the axis.
        table: table of the record with the latency's floor.
    """

    def draw(axes: Axes) -> None:
        names = list(runs)
        for name in names:
            points = [(one[key], one["output_throughput"]) for one in runs[name]]
            draw_line(axes, name, points, names)
        if floor := _floor(record, table):
            draw_floor(axes, floor)
        for one in runs[names[0]]:
            if one.get("max_concurrency"):
                _mark(axes, one, key)
        plain_log(axes, "x")
        plain_log(axes, "y")
        axes.set_xlabel(label)
        axes.set_ylabel("output tokens/s")

    return draw


def _floor(record: Record, table: str) -> list[tuple[float, float]]:
    """Return (latency, throughput) of the floor at each concurrency; [] if the record has none."""
    tables = record.get("tables") or {}
    best = {row["point"]: row.get("floor") for row in tables.get(FLOORS, ())}
    rows = [row for row in tables.get(table, ()) if row.get("floor") and best.get(row["point"])]
    return [(row["floor"], best[row["point"]]) for row in rows]


def _mark(axes: Axes, run: Run, key: str) -> None:
    """Write a run's concurrency beside its point."""
    axes.annotate(
        str(run["max_concurrency"]),
        (run[key], run["output_throughput"]),
        xytext=(-5, 5),
        textcoords="offset points",
        ha="right",
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        fontsize=7.5,
    )
