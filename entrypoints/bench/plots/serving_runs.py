"""The runs of servers under load in a record, by the line of a chart that they belong to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from glowplug.entrypoints.bench.plots.panels import OURS, Record, ours_first

Run = dict[str, Any]
AS_CONFIGURED = "as configured"  #: line of the setting of `bench sweep` that changes nothing


def runs_of(record: Record) -> dict[str, list[Run]]:
    """Return the runs of each line, ascending by concurrency and rate; {} for other records.

    A line is an engine of ``bench versus``, a setting of ``bench sweep``, or what ``line_of`` says
    about the results of ``bench serving``. The settings keep the order of the record.
    """
    found = record.get("runs")
    if not isinstance(found, dict):
        found = _grouped(record.get("results") or ())
    runs = {name: sorted(filter(_is_run, every), key=_order) for name, every in found.items()}
    return {name: runs[name] for name in ours_first(runs) if runs[name]}


def line_of(run: Run) -> str:
    """Return the line of a result: its setting, else its tag, else the measured kind of server."""
    if "setting" in run:
        return str(run["setting"]) or AS_CONFIGURED
    return str(run.get("tag") or run.get("backend") or OURS)


def rate_of(run: Run) -> float | None:
    """Return the constant request rate of a run; None if all requests were sent at once."""
    rate = float(run.get("request_rate") or math.inf)
    return rate if math.isfinite(rate) else None


def _grouped(results: Sequence[Run]) -> dict[str, list[Run]]:
    """Return results by their line, in the order of the first of each."""
    found: dict[str, list[Run]] = {}
    for run in filter(_is_run, results):
        found.setdefault(line_of(run), []).append(run)
    return found


def _is_run(result: Run) -> bool:
    """Return whether a result is of a server under load, and has answered requests."""
    return "mean_tpot_ms" in result and result.get("completed") != 0


def _order(run: Run) -> tuple[float, float]:
    return run.get("max_concurrency") or math.inf, rate_of(run) or math.inf
