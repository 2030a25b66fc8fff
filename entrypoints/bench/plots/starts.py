"""Charts of a start: its phases, and memory by name.

Records: ``startup.json``, ``memory-h200.json``, ``bench one-batch --save``, ``bench versus`` and
``glowplug ablate``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    COLORS,
    OURS_COLOR,
    PALE,
    Axes,
    Panel,
    Record,
    plain_log,
    title_of,
    write_beside,
)

REST = "imports and other"
PHASE_COLORS = (OURS_COLOR, COLORS[0], COLORS[1], COLORS[2], COLORS[3], COLORS[5], PALE)
BAR_INCHES = 0.42  #: height of a bar with its distance to the next
EDGE_INCHES = 0.9  #: height of the axis below and the title above
SEEN_SHARE = 0.004  #: share of the longest start, above which a phase is drawn
LABEL_CHARACTERS = 30  #: of a line of a bar's label

Start = tuple[str, dict[str, float]]


def starts_of(record: Record) -> list[Start]:
    """Return (name, seconds by phase) of every start in a record; [] if it has none."""
    if isinstance(record.get("starts"), list):
        return [(one["what"], _with_rest(one)) for one in record["starts"]]
    rows = record.get("rows")
    if isinstance(rows, list):
        return [
            (one["row"], one["startup_seconds"])
            for one in rows
            if isinstance(one, Mapping) and one.get("row") and one.get("startup_seconds")
        ]
    conditions = record.get("conditions") or record
    phases = conditions.get("startup_seconds")
    return [(title_of(record) or "start", phases)] if phases else []


def _with_rest(start: Mapping[str, Any]) -> dict[str, float]:
    """Return a start's phases, and the rest of its whole time."""
    phases = dict(start["phases"])
    rest = start.get("total_seconds", 0.0) - sum(phases.values())
    return phases | ({REST: round(rest, 3)} if rest > 0 else {})


def start_panels(record: Record) -> list[Panel]:
    """Return the panel of start-up phases, a bar for each start."""
    starts = starts_of(record)
    if not starts:
        return []
    height = EDGE_INCHES + BAR_INCHES * len(starts)
    return [
        Panel(title_of(record), lambda axes: _draw_starts(axes, starts), width=7.0, height=height)
    ]


def _shown_phases(starts: Sequence[Start]) -> list[str]:
    """Return the phases that are long enough to be seen, in the order of the first start."""
    names = dict.fromkeys(name for _, phases in starts for name in phases)
    least = SEEN_SHARE * max(sum(phases.values()) for _, phases in starts)
    return [name for name in names if max(one.get(name, 0.0) for _, one in starts) > least]


def _draw_starts(axes: Axes, starts: Sequence[Start]) -> None:
    """Draw a bar for each start, with a part for each phase."""
    labels = [textwrap.fill(label, LABEL_CHARACTERS) for label, _ in starts]
    left = [0.0] * len(starts)
    for name, color in zip(_shown_phases(starts), PHASE_COLORS):
        widths = [phases.get(name, 0.0) for _, phases in starts]
        axes.barh(labels, widths, left=left, label=name, color=color, height=0.62)
        left = [a + b for a, b in zip(left, widths)]
    for at, total in enumerate(left):
        write_beside(axes, f"{total:.1f} s", (total, at), 8.0)
    axes.invert_yaxis()
    axes.set_xlim(right=1.12 * max(left))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time, s")


# ---- memory --------------------------------------------------------------------------------------


def memory_panels(record: Record) -> list[Panel]:
    """Return a panel for each engine whose memory the record has by name, planned and measured."""
    return [
        Panel("", _lines_drawing(lines), what, width=4.6, height=EDGE_INCHES + 0.4 * len(lines))
        for what, lines in _budgets(record)
    ]


def _budgets(record: Record) -> list[tuple[str, dict[str, tuple[float, float]]]]:
    """Return (what, {line: (planned, measured)}) in MiB of every engine in a record."""
    if isinstance(record.get("memory_mib"), Mapping):
        return [(title_of(record), _pairs(record["memory_mib"]["lines"]))]
    found = []
    for model, allocators in record.items():
        if not isinstance(allocators, Mapping) or record.get("unit") != "MiB":
            continue
        lines = allocators.get("growing segments")
        pairs = _pairs(lines) if isinstance(lines, Mapping) else {}
        if len(pairs) > 2:
            found.append((model, pairs))
    return found


def _pairs(lines: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return (planned, measured) of the lines that have both, the largest first."""
    pairs = {
        name: (float(line["planned"]), float(line["measured"]))
        for name, line in lines.items()
        if isinstance(line, Mapping) and line.get("planned") and line.get("measured")
    }
    return dict(sorted(pairs.items(), key=lambda one: -one[1][1]))


def _lines_drawing(lines: Mapping[str, tuple[float, float]]) -> Any:
    """Return the drawing of planned and measured memory by name."""

    def draw(axes: Axes) -> None:
        _pair_of_bars(axes, list(lines), list(lines.values()))
        plain_log(axes, "x")
        least, most = axes.get_xlim()
        axes.set_xlim(least / 3, 4 * most)
        axes.set_xlabel("memory, MiB (logarithmic)")

    return draw


def _pair_of_bars(axes: Axes, names: Sequence[str], pairs: Sequence[tuple[float, float]]) -> None:
    """Draw two bars for each name: planned above measured."""
    places = range(len(names))
    planned, measured = zip(*pairs)
    upper = [at - 0.19 for at in places]
    lower = [at + 0.19 for at in places]
    for at, value in zip(lower, measured):
        write_beside(axes, f"{value:,.0f}", (value, at))
    axes.barh(lower, measured, height=0.36, color=OURS_COLOR, label="measured")
    axes.barh(upper, planned, height=0.36, color=PALE, label="planned")
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
