"""Charts of static batches: decode time against batch, and the share of the floor.

Records: ``bench versus`` (``static.json``) and ``bench one-batch --save``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    FLOOR_COLOR,
    OURS,
    Axes,
    Panel,
    Record,
    draw_floor,
    draw_line,
    ours_first,
    powers_of_two,
    title_of,
)

DECODE, PREFILL = "decode step, ms", "prefill, tokens/s"
#: columns of a table of `bench versus` that are no engines
DERIVED = ("point", "times_best_peer", "times_one_gpu", "floor", "share_of_floor")

Row = dict[str, Any]


def table_of(record: Record, name: str) -> list[Row]:
    """Return the rows of a table of static batches, ascending by batch; [] if there is none.

    Results of `bench one-batch` become a table with this engine alone.
    """
    tables = record.get("tables")
    if tables:
        return sorted(tables.get(name, ()), key=lambda row: row["point"])
    keys = {
        DECODE: ("decode_median_ms", "floor_ms"),
        PREFILL: ("prefill_tokens_per_s", "floor_prefill_tokens_per_s"),
    }[name]
    results = [one for one in record.get("results") or () if one.get(keys[0])]
    rows = [{"point": one["batch_size"], OURS: one[keys[0]]} for one in results]
    for row, one in zip(rows, results):
        if one.get(keys[1]):
            row["floor"] = one[keys[1]]
    return sorted(rows, key=lambda row: row["point"])


def engines_of(rows: Sequence[Row]) -> list[str]:
    """Return the engines of a table, this one first."""
    return ours_first({key: None for row in rows for key in row if key not in DERIVED})


def points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Return (batch, value) of the rows that have a value."""
    return [(row["point"], row[key]) for row in rows if row.get(key) is not None]


def decode_panels(record: Record) -> list[Panel]:
    """Return the panel of decode times."""
    rows = table_of(record, DECODE)
    if not rows:
        return []

    def draw(axes: Axes) -> None:
        names = engines_of(rows)
        for name in names:
            draw_line(axes, name, points(rows, name), names)
        if floor := points(rows, "floor"):
            draw_floor(axes, floor)
        powers_of_two(axes, [row["point"] for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size, sequences")
        axes.set_ylabel("decode step, ms")

    return [Panel(title_of(record), draw)]


def floor_panels(record: Record) -> list[Panel]:
    """Return the panels of the share of the floor that decoding and prefill reach."""
    found = []
    for name, what in ((DECODE, "decode"), (PREFILL, "prefill")):
        rows = [row for row in table_of(record, name) if row.get("floor")]
        if rows:
            draw = _share_drawing(rows, name == DECODE)
            found.append(Panel(title_of(record), draw, what))
    return found


def _share_drawing(rows: Sequence[Row], is_time: bool) -> Any:
    """Return the drawing of the share of the floor.

    Args:
        rows: the table.
        is_time: the figures are times, so that lower ones are better.
    """

    def draw(axes: Axes) -> None:
        names = engines_of(rows)
        for name in names:
            shares = [
                (row["point"], 100 * (row["floor"] / row[name] if is_time else row[name] / floor))
                for row in rows
                if row.get(name) and (floor := row["floor"])
            ]
            draw_line(axes, name, shares, names)
        axes.axhline(100, label="floor", color=FLOOR_COLOR, linestyle="--", linewidth=1.2)
        powers_of_two(axes, [row["point"] for row in rows])
        axes.set_ylim(0, 110)
        axes.set_xlabel("batch size, sequences")
        axes.set_ylabel("share of the floor, %")

    return draw
