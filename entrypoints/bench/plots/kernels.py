"""Charts of single kernels: time of each provider against rows, and the kernels of a step.

Records: tables of microseconds by provider (``attention-h200.json``), and ``bench kernels``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    OURS_COLOR,
    Axes,
    Panel,
    Record,
    draw_floor,
    draw_line,
    plain_log,
    powers_of_two,
)

Row = Mapping[str, Any]
PROVIDERS = ("backend", "experts")  #: keys of the provider in a row
ROWS = ("tokens", "rows")  #: keys of the number of rows
#: keys whose values make a panel each -> text of a value
GROUPS = {
    "heads": "{} heads",
    "kv_heads": "{} KV",
    "context": "context {}",
    "width": "width {}",
    "cache": "{}",
}
#: providers of this project, which are drawn first
OWN = ("triton", "triton_mla", "triton_mha", "hopper")
CHOSEN = "*"  #: ends the provider's name that the plan chooses, in `bench kernels`
KERNELS = 12  #: kernels in a panel of `bench kernels`
PANELS = 6  #: panels of a chart


def kernel_panels(record: Record) -> list[Panel]:
    """Return the panels of a record of kernels."""
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return []
    if "step_us" in rows[0]:
        return _step_panels(rows)
    provider = next((key for key in PROVIDERS if key in rows[0]), None)
    if provider is None or "us" not in rows[0]:
        return []
    kind = rows[0].get("what")
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("what") == kind:
            groups[_group(row)].append(row)
    several = {title: found for title, found in groups.items() if len(_sizes(found)) > 1}
    return [Panel("", _by_provider(found, provider), what) for what, found in several.items()][
        :PANELS
    ]


def _group(row: Row) -> str:
    """Return the title of the panel of a row."""
    return ", ".join(text.format(row[key]) for key, text in GROUPS.items() if key in row)


def _size(row: Row) -> float:
    return float(next(row[key] for key in ROWS if key in row))


def _sizes(rows: Sequence[Row]) -> set[float]:
    return {_size(row) for row in rows}


def _microseconds(row: Row) -> float:
    """Return a row's time; the mean of several rounds."""
    return float(mean(row["us"]) if isinstance(row["us"], list) else row["us"])


def _by_provider(rows: Sequence[Row], key: str) -> Any:
    """Return the drawing of times by provider. ``key``: key of the provider in a row."""

    def draw(axes: Axes) -> None:
        names = sorted(dict.fromkeys(row[key] for row in rows), key=lambda name: name not in OWN)
        for name in names:
            points = sorted((_size(row), _microseconds(row)) for row in rows if row[key] == name)
            draw_line(axes, name, points, names)
        floor = sorted({(_size(row), row["floor_us"]) for row in rows if row.get("floor_us")})
        if floor:
            draw_floor(axes, floor)
        powers_of_two(axes, _sizes(rows))
        plain_log(axes, "y")
        axes.set_xlabel("tokens")
        axes.set_ylabel("time a layer, us")

    return draw


def _step_panels(rows: Sequence[Row]) -> list[Panel]:
    """Return a panel for each step of `bench kernels` with its slowest kernels."""
    steps: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["provider"].endswith(CHOSEN):
            name = f"{row['slot']}: {row['kernel']}"
            steps[row["step"]][name] += row["step_us"]
    return [
        Panel("", _bars(sorted(times.items(), key=lambda one: -one[1])[:KERNELS]), step)
        for step, times in steps.items()
    ][:PANELS]


def _bars(times: Sequence[tuple[str, float]]) -> Any:
    """Return the drawing of (kernel, microseconds), the slowest on top."""

    def draw(axes: Axes) -> None:
        axes.barh([name for name, _ in times], [spent for _, spent in times], color=OURS_COLOR)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time in a step, us")

    return draw
