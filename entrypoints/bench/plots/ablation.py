"""Chart of an ablation: speed of a single query and throughput, a bar for each row.

Record: ``glowplug ablate``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    FLOOR_COLOR,
    INK,
    OURS_COLOR,
    PALE_INK,
    Axes,
    Panel,
    Record,
    write_beside,
)

Row = Mapping[str, Any]
LEFT_OUT = ("same plan", "left out")  #: status of rows without a bar
BAR_INCHES = 0.27
LABEL_CHARACTERS = 36  #: of a line of a label
EDGE_INCHES = 1.0
ROW_COLOR = "#7fa6d3"


def ablation_panels(record: Record) -> list[Panel]:
    """Return a panel for single queries, and one for the highest concurrency of all rows."""
    rows = record.get("rows")
    if record.get("kind") != "glowplug ablate" or not isinstance(rows, list):
        return []
    shown = [(at, row) for at, row in enumerate(rows, 1) if row["status"] not in LEFT_OUT]
    bars = []
    if any(row.get("single") for _, row in shown):
        bars.append(AblationBars("single query", shown, _single, "output tokens/s"))
    levels = {one["concurrency"] for _, row in shown for one in row.get("offline") or ()}
    if levels:
        title = f"{max(levels)} requests at a time"
        figure = partial(_at, level=max(levels))
        bars.append(AblationBars(title, shown, figure, "prompt and output tokens/s", not bars))
    height = EDGE_INCHES + BAR_INCHES * len(shown)
    return [
        Panel("", one.draw, one.title, width=4.6 if one.named else 3.2, height=height)
        for one in bars
    ]


def _single(row: Row) -> float | None:
    single = row.get("single")
    return single["tokens_per_s"] if single else None


def _at(row: Row, level: int) -> float | None:
    """Return a row's throughput at a concurrency; None if it has none."""
    found = {one["concurrency"]: one["total_throughput"] for one in row.get("offline") or ()}
    return found.get(level)


@dataclass(frozen=True)
class AblationBars:
    """A figure of every row as bars; the first row is the base.

    Attributes:
        title: text above the bars.
        rows: numbers and rows.
        figure: the figure of a row; None: the row has no number, but a reason.
        unit: label of the axis.
        named: write the settings of each row beside its bar.
    """

    title: str
    rows: Sequence[tuple[int, Row]]
    figure: Callable[[Row], float | None]
    unit: str
    named: bool = True

    def draw(self, axes: Axes) -> None:
        """Draw the bars, and a dashed line at the base's end."""
        values = [self.figure(row) for _, row in self.rows]
        lengths = [value or 0.0 for value in values]
        colors = [OURS_COLOR, *[ROW_COLOR] * (len(values) - 1)]
        axes.barh(range(len(values)), lengths, color=colors, height=0.66)
        if values[0]:
            axes.axvline(values[0], color=FLOOR_COLOR, linestyle="--", linewidth=1.0, zorder=0.9)
        for at, value in enumerate(values):
            text, color = self._text(at, value, values[0]), INK if value else PALE_INK
            write_beside(axes, text, (value or 0.0, at), color=color)
        axes.set_xlim(0, (1.22 if self.named else 1.32) * max(lengths))
        axes.set_xlabel(self.unit)
        self._name_rows(axes)

    def _name_rows(self, axes: Axes) -> None:
        """Write the settings of the rows beside the bars, the first row on top."""
        labels = [_label(at, row["row"]) if self.named else "" for at, row in self.rows]
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")

    def _text(self, at: int, value: float | None, base: float | None) -> str:
        """Return the value of a bar and its ratio to the base, or why it has none."""
        if value is None:
            row = self.rows[at][1]
            failure = row.get("failure")
            return str(failure["kind"] if failure else row["status"])
        return f"{value:,.0f}" + (f"  {value / base:.2f}x" if base and at else "")


def _label(number: int, settings: str) -> str:
    """Return the label of a bar: number and settings of its row in at most two lines."""
    lines = textwrap.wrap(f"{number}. {settings}", LABEL_CHARACTERS, max_lines=2, placeholder=" ..")
    return "\n".join(lines)
