"""Figures from panels, written as SVG. The only module that imports matplotlib.

Equal records give equal files: no date, identifiers from a fixed salt, texts as text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.plots.catalogue import charts_of
from glowplug.entrypoints.bench.plots.panels import Panel, Record

HANDLE_INCHES = 0.5  #: width of a legend's mark with its distances
CHARACTER_INCHES = 0.068
LEGEND_INCHES = 0.35  #: height of the legend below the panels
STYLE: dict[str, Any] = {
    "svg.hashsalt": "glowplug",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.0,
    "text.parse_math": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e5e9",
    "grid.linewidth": 0.7,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


class MissingMatplotlib(GlowplugError):
    """matplotlib, which draws the charts, is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "charts need matplotlib, which is not installed; "
            "fix: pip install -c constraints.txt matplotlib (or pip install 'glowplug[plots]'), "
            "then glowplug bench plot FILE"
        )


def _matplotlib() -> tuple[Any, Any]:
    """Return matplotlib, and its class of figures.

    Raises:
        MissingMatplotlib: it is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingMatplotlib from None
    return matplotlib, Figure


def draw(panels: Sequence[Panel], path: Path, wrap: int) -> None:
    """Draw panels beside each other with one legend, and write the figure to ``path``.

    Args:
        panels: the panels.
        path: an SVG file, or another format by its ending.
        wrap: most panels beside each other.

    Raises:
        MissingMatplotlib: matplotlib is not installed.
    """
    matplotlib, make_figure = _matplotlib()
    widths, heights = _sizes(panels, 2 if len(panels) == 4 else min(wrap, len(panels)))
    size = (sum(widths), sum(heights) + LEGEND_INCHES)
    with matplotlib.rc_context(STYLE):
        figure = make_figure(figsize=size, layout="constrained")
        grid = figure.subplots(
            len(heights),
            len(widths),
            squeeze=False,
            height_ratios=heights,
            width_ratios=widths,
        )
        places = list(grid.flat)
        for panel, axes in zip(panels, places):
            axes.set_title(panel.heading)
            panel.draw(axes)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        _add_legend(figure, places)
        _save(figure, path)


def _sizes(panels: Sequence[Panel], wide: int) -> tuple[list[float], list[float]]:
    """Return widths of columns and heights of lines in inches. ``wide``: number of columns."""
    lines = [panels[at : at + wide] for at in range(0, len(panels), wide)]
    heights = [max(panel.height for panel in line) for line in lines]
    return [max(panel.width for panel in panels[at::wide]) for at in range(wide)], heights


def _add_legend(figure: Any, places: Sequence[Any]) -> None:
    """Add one legend for all panels below them, each label once."""
    labelled: dict[str, Any] = {}
    for axes in places:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            labelled.setdefault(label, handle)
    if len(labelled) > 1:
        figure.legend(
            labelled.values(),
            labelled.keys(),
            loc="outside lower center",
            ncols=_legend_columns(list(labelled), figure.get_figwidth()),
        )


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Return the number of columns of a legend that fit into ``width`` inches."""
    column = HANDLE_INCHES + CHARACTER_INCHES * max(map(len, labels))
    return max(1, min(len(labels), int(width / column)))


def _save(figure: Any, path: Path) -> None:
    """Write the figure, replacing an existing file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    kind = path.suffix.removeprefix(".") or "svg"
    metadata = {"Date": None, "Creator": None} if kind == "svg" else None
    figure.savefig(unfinished, format=kind, metadata=metadata)
    os.replace(unfinished, path)


def draw_record(record: Record, path: Path) -> bool:
    """Draw a record as the first chart that fits it; return False if it has no figures yet.

    Raises:
        MissingMatplotlib: matplotlib is not installed.
    """
    charts = charts_of(record)
    if charts:
        draw(charts[0].panels(record), path, charts[0].wrap)
    return bool(charts)
