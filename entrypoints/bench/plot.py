"""``glowplug bench plot``: charts of results as SVG.

Each file gives every chart that its record has figures for. ``--together`` draws a chart of several
files with the panels of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.plots.catalogue import CHARTS, charts_of, read_record
from glowplug.entrypoints.bench.plots.drawing import draw
from glowplug.entrypoints.bench.plots.panels import Chart, Panel, Record

FORMATS = (".svg", ".png", ".pdf")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="results of `glowplug ablate`, `bench versus`, `bench one-batch --save`, `bench "
        "serving`, `bench sweep`, `bench kernels`, `bench soak`, or a record of docs/benchmarks",
    )
    parser.add_argument(
        "--chart",
        nargs="+",
        choices=tuple(chart.name for chart in CHARTS),
        default=None,
        help="charts to draw: "
        + "; ".join(f"{chart.name}: {chart.about}" for chart in CHARTS)
        + "; default: all that the files have figures for",
    )
    parser.add_argument(
        "--titles", nargs="+", default=None, metavar="TITLE", help="name of each file's panels"
    )
    parser.add_argument(
        "--together",
        type=Path,
        default=None,
        metavar="FILE",
        help="draw one chart with the panels of all files into FILE (.svg, .png or .pdf)",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="folder of the charts; default: beside each file",
    )


def run(args: argparse.Namespace) -> int:
    """Draw the charts and print the path of each.

    Returns:
        Exit status 0; 2 if a file cannot be drawn, or matplotlib is missing.
    """
    try:
        for path in _drawn(args):
            print(path)
    except (GlowplugError, OSError, ValueError) as error:
        print(f"glowplug bench plot: {error}", file=sys.stderr)
        return 2
    return 0


def _drawn(args: argparse.Namespace) -> list[Path]:
    """Draw the charts and return their paths.

    Raises:
        GlowplugError: matplotlib is missing.
        OSError: a file cannot be read or written.
        ValueError: a file has no figures, or the options do not fit together.
    """
    titles = args.titles or [None] * len(args.files)
    if len(titles) != len(args.files):
        raise ValueError("--titles must have one value for each file")
    records = {path: read_record(path) for path in args.files}
    if args.together is not None:
        name = _only(args.chart, list(records.values()))
        return [draw_together(name, list(records.items()), titles, args.together)]
    found = []
    for (path, record), title in zip(records.items(), titles):
        folder: Path = args.output_dir or path.parent
        for chart in _wanted(path, record, args.chart):
            target = folder / f"{path.stem}-{chart.name}.svg"
            draw(_titled(chart.panels(record), title), target, chart.wrap)
            found.append(target)
    return found


def _only(given: Sequence[str] | None, records: Sequence[Record]) -> str:
    """Return the chart that ``--together`` draws: the given one, or the only one there is.

    Raises:
        ValueError: there are several.
    """
    names = given or sorted({chart.name for record in records for chart in charts_of(record)})
    if len(names) != 1:
        raise ValueError(f"--together draws one chart: give --chart, one of {', '.join(names)}")
    return names[0]


def _wanted(path: Path, record: Record, names: Sequence[str] | None) -> list[Chart]:
    """Return the charts of a record to draw.

    Raises:
        ValueError: there is none.
    """
    fitting = charts_of(record)
    wanted = [chart for chart in fitting if names is None or chart.name in names]
    if not wanted:
        has = ", ".join(chart.name for chart in fitting) or "no chart"
        raise ValueError(f"{path} has figures for {has}")
    return wanted


def draw_together(
    name: str, records: Sequence[tuple[Path, Record]], titles: Sequence[str | None], target: Path
) -> Path:
    """Draw one chart with the panels of several records and return its path.

    Args:
        name: the chart.
        records: paths and records, in order.
        titles: name of each record's panels; None: their own.
        target: the file to write.

    Raises:
        MissingMatplotlib: matplotlib is not installed.
        ValueError: a record has no figures for the chart, or the target's format is unknown.
    """
    if target.suffix not in FORMATS:
        raise ValueError(f"{target}: expected a name that ends in {', '.join(FORMATS)}")
    panels: list[Panel] = []
    wraps = []
    for (path, record), title in zip(records, titles, strict=True):
        for chart in _wanted(path, record, [name]):
            panels += _titled(chart.panels(record), title)
            wraps.append(chart.wrap)
    draw(panels, target, max(wraps))
    return target


def _titled(panels: Sequence[Panel], title: str | None) -> list[Panel]:
    """Return panels with ``title`` in place of the record's own name, unless it is None."""
    return [panel if title is None else replace(panel, title=title) for panel in panels]
