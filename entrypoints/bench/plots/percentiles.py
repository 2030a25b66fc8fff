"""Chart of servers under load: percentiles of the latencies, and goodput, against the load.

Records: ``bench serving``, ``bench sweep`` and ``bench versus`` (``serving.json``). A record has
the percentiles of ``--metric-percentiles``; the median is drawn as the 50th.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    MARKERS,
    OURS_COLOR,
    TITLES,
    Axes,
    Panel,
    Record,
    color,
    plain_log,
    powers_of_two,
    title_of,
)
from glowplug.entrypoints.bench.plots.serving_runs import Run, rate_of, runs_of

#: metric in the keys of a run -> its name
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end-to-end latency"}
PERCENTILE = re.compile(r"p(?P<percentile>\d+(?:\.\d+)?)_(?P<metric>[a-z0-9]+)_ms")
MEDIAN = 50.0
#: (key, name in the legend, dashes) of the lines of goodput
GOODPUT = (
    ("request_goodput", "within the limits", "-"),
    ("request_throughput", "all requests", ":"),
)
#: dashes of the percentiles, from the lowest on
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (3, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))


@dataclass(frozen=True)
class LoadAxis:
    """The quantity that the runs of a record vary.

    Attributes:
        label: its name on the axis.
        value: its value in a run; None or 0 if the run does not have it.
    """

    label: str
    value: Callable[[Run], float | None]


CONCURRENCY = LoadAxis("most requests in flight", lambda run: run.get("max_concurrency"))
RATE = LoadAxis("requests sent per second", rate_of)
#: of runs that send all requests at once
MEASURED = LoadAxis("requests in flight, mean", lambda run: round(run.get("concurrency") or 0, 1))


def percentile_panels(record: Record) -> list[Panel]:
    """Return a panel for each latency that has percentiles, and one of recorded goodput."""
    runs = runs_of(record)
    every = [run for line in runs.values() for run in line]
    axis = axis_of(every)
    if axis is None:
        return []
    title = title_of(record)
    found = {metric: percentiles_of(every, metric) for metric in METRICS}
    dashes = dict(zip(sorted(set().union(*found.values())), cycle(DASHES)))
    panels = [
        Panel(title, PercentileLines(runs, axis, metric, found[metric], dashes).draw, name)
        for metric, name in METRICS.items()
        if found[metric]
    ]
    if any(run.get("request_goodput") is not None for run in every):
        what = " at ".join(part for part in ("goodput", _limits(every)) if part)
        panels.append(Panel(title, GoodputLines(runs, axis).draw, what))
    return panels


def axis_of(runs: Sequence[Run]) -> LoadAxis | None:
    """Return the quantity that varies over the runs, or the first that all of them have.

    Returns:
        The limit of the concurrency, the request rate or the measured concurrency; None if there
            are no runs, or they have none of the three in common.
    """
    fitting = [
        axis
        for axis in (CONCURRENCY, RATE, MEASURED)
        if runs and all(axis.value(run) for run in runs)
    ]
    varying = [axis for axis in fitting if len({axis.value(run) for run in runs}) > 1]
    return next(iter(varying or fitting), None)


def percentiles_of(runs: Sequence[Run], metric: str) -> list[float]:
    """Return the percentiles of a metric that any run has, ascending; the median is the 50th.

    Returns:
        The percentiles; [] if the median is the only one.
    """
    keys = (PERCENTILE.fullmatch(key) for run in runs for key in run)
    named = {float(key["percentile"]) for key in keys if key and key["metric"] == metric}
    found = {one for one in {MEDIAN, *named} if any(_value(run, metric, one) for run in runs)}
    return sorted(found) if found - {MEDIAN} else []


def _value(run: Run, metric: str, percentile: float) -> float | None:
    """Return a percentile of a run in milliseconds; None if the run does not have it."""
    value: float | None = run.get(f"p{percentile:g}_{metric}_ms")
    if value is None and percentile == MEDIAN:
        value = run.get(f"median_{metric}_ms")
    return value


@dataclass(frozen=True)
class PercentileLines:
    """The percentiles of a latency: a colour for each line of runs, dashes for each percentile.

    Attributes:
        runs: runs of each line.
        axis: the quantity on the x axis.
        metric: name of the latency in the keys of a run.
        percentiles: the percentiles of the latency, ascending.
        dashes: dashes of each percentile of the chart.
    """

    runs: Mapping[str, Sequence[Run]]
    axis: LoadAxis
    metric: str
    percentiles: Sequence[float]
    dashes: Mapping[float, Any]

    def draw(self, axes: Axes) -> None:
        """Draw the lines on logarithmic axes."""
        for name in self.runs:
            for percentile in self.percentiles:
                self._draw_line(axes, name, percentile)
        _scale(axes, self.runs, self.axis)
        plain_log(axes, "y")
        axes.set_ylabel(f"{METRICS[self.metric]}, ms")

    def _draw_line(self, axes: Axes, name: str, percentile: float) -> None:
        """Draw one percentile of one line of runs."""
        points = [
            (self.axis.value(run), value)
            for run in self.runs[name]
            if (value := _value(run, self.metric, percentile))
        ]
        if points:
            axes.plot(
                *zip(*points),
                label=_label(name, f"p{percentile:g}", len(self.runs)),
                linestyle=self.dashes[percentile],
                **_style(name, list(self.runs)),
            )


@dataclass(frozen=True)
class GoodputLines:
    """Requests per second that meet the limits of goodput, beside all that were answered.

    Attributes:
        runs: runs of each line.
        axis: the quantity on the x axis.
    """

    runs: Mapping[str, Sequence[Run]]
    axis: LoadAxis

    def draw(self, axes: Axes) -> None:
        """Draw goodput with whole lines and the throughput with dashed ones."""
        for name, every in self.runs.items():
            for key, what, dashes in GOODPUT:
                points = [
                    (self.axis.value(run), run[key]) for run in every if run.get(key) is not None
                ]
                if points:
                    label = _label(name, what, len(self.runs))
                    style = _style(name, list(self.runs))
                    axes.plot(*zip(*points), label=label, linestyle=dashes, **style)
        _scale(axes, self.runs, self.axis)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("requests/s")


def _limits(runs: Sequence[Run]) -> str:
    """Return the limits of goodput in the runs: ``TTFT 200 ms, TPOT 50 ms``; "" without any."""
    found = {
        f"{METRICS[metric]} {limit:g} ms": None
        for run in runs
        for metric, limit in (run.get("goodput_limits_ms") or {}).items()
    }
    return ", ".join(found)


def _scale(axes: Axes, runs: Mapping[str, Sequence[Run]], axis: LoadAxis) -> None:
    """Give the x axis the values of the load."""
    values = [axis.value(run) for every in runs.values() for run in every]
    powers_of_two(axes, [value for value in values if value])
    axes.set_xlabel(axis.label)


def _label(name: str, what: str, lines: int) -> str:
    """Return an entry of the legend; with one line of runs it does not name the line."""
    return what if lines == 1 else f"{TITLES.get(name, name)} {what}"


def _style(name: str, names: Sequence[str]) -> dict[str, object]:
    """Return the colour and mark of a line of runs; the first has the thickest."""
    first = name == names[0]
    return {
        "color": OURS_COLOR if first else color(name, names[1:]),
        "marker": MARKERS[names.index(name) % len(MARKERS)],
        "linewidth": 1.8 if first else 1.2,
        "markersize": 3.5,
    }
