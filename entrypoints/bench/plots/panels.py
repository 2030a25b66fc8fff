"""Parts of the charts: panels, charts, and the colours of engines and providers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Axes = Any  #: matplotlib's Axes; matplotlib may be missing

OURS = "glowplug"
OURS_COLOR = "#1f5fa8"
FLOOR_COLOR = "#555555"
INK = "#222222"
PALE_INK = "#777777"
PALE = "#b9c2cc"  #: planned values
#: colours of others, in the order of their first appearance in a panel
COLORS = ("#d9822b", "#4c9a62", "#8c6bb1", "#c4547a", "#6b7a8a", "#a98b2d")
#: fixed colours, so that an engine has the same one in every chart
ENGINE_COLORS = {OURS: OURS_COLOR, "one_gpu": "#7fa6d3", "sglang": COLORS[0], "vllm": COLORS[1]}
TITLES = {"sglang": "SGLang", "vllm": "vLLM", "one_gpu": "glowplug, one GPU"}
#: (ratio of the largest value to the least, ticks in a decade up to this ratio)
TICK_STEPS: tuple[tuple[float, tuple[int, ...]], ...] = (
    (8, (1, 2, 3, 5, 7)),
    (100, (1, 2, 5)),
    (math.inf, (1,)),
)
LABEL_SHARE = 0.09  #: of an axis that a label takes
MARGIN = 1.35  #: factor between the data and the end of a logarithmic axis
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Panel:
    """A part of a chart with axes of its own.

    Attributes:
        title: name of the record, such as its model and card.
        draw: draws on the axes and sets their labels.
        what: part of the record that the panel shows; "" if it shows the whole.
        width: inches.
        height: inches.
    """

    title: str
    draw: Callable[[Axes], None]
    what: str = ""
    width: float = 4.0
    height: float = 3.0

    @property
    def heading(self) -> str:
        """Text above the axes."""
        return ": ".join(part for part in (self.title, self.what) if part)


@dataclass(frozen=True)
class Chart:
    """A kind of chart.

    Attributes:
        name: name on the command line, and ending of the file's name.
        about: one line for the help.
        panels: the panels of a record; [] if the record is of another kind.
        wrap: most panels beside each other.
    """

    name: str
    about: str
    panels: Callable[[Record], list[Panel]]
    wrap: int = 3


def color(name: str, others: Iterable[str]) -> str:
    """Return the colour of an engine or provider.

    Args:
        name: its name.
        others: the names in the panel that have no fixed colour, in order.
    """
    if name in ENGINE_COLORS:
        return ENGINE_COLORS[name]
    free = [one for one in others if one not in ENGINE_COLORS]
    return COLORS[free.index(name) % len(COLORS)]


def ours_first(names: Iterable[str]) -> list[str]:
    """Return names with this engine's first, the others in order."""
    return sorted(names, key=lambda name: name != OURS)


def draw_line(
    axes: Axes, name: str, points: Sequence[tuple[float, float]], names: Sequence[str]
) -> None:
    """Draw one engine's or provider's line with its marks; this engine's is thicker and on top.

    Args:
        axes: the axes.
        name: the engine or provider.
        points: (x, y) in order.
        names: all names in the panel, for colours and marks.
    """
    ours = name == names[0]
    axes.plot(
        *zip(*points),
        label=TITLES.get(name, name),
        color=OURS_COLOR if ours else color(name, names[1:]),
        marker=MARKERS[list(names).index(name) % len(MARKERS)],
        linewidth=2.2 if ours else 1.3,
        zorder=4 if ours else 3,
    )


def draw_floor(axes: Axes, points: Sequence[tuple[float, float]], label: str = "floor") -> None:
    """Draw the floor as a dashed reference line."""
    axes.plot(*zip(*points), label=label, color=FLOOR_COLOR, linestyle="--", linewidth=1.2)


def write_beside(
    axes: Axes, text: str, point: tuple[float, float], size: float = 7.5, color: str = INK
) -> None:
    """Write the value of a bar beside its end."""
    axes.annotate(
        text,
        point,
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=size,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )


def powers_of_two(axes: Axes, values: Iterable[float]) -> None:
    """Give the x axis a logarithmic scale with a tick at each value, labelled where it fits."""
    ticks = sorted(set(values))
    room = math.log2(ticks[-1] / ticks[0]) * LABEL_SHARE
    axes.set_xscale("log", base=2)
    narrow = [math.log2(following / tick) < room for tick, following in zip(ticks, ticks[1:])]
    labels = [f"{tick:g}" for tick in ticks]
    axes.set_xticks(
        ticks, ["" if hidden else label for label, hidden in zip(labels, [*narrow, False])]
    )
    axes.minorticks_off()


def plain_log(axes: Axes, which: str) -> None:
    """Give an axis a logarithmic scale whose ticks are plain numbers, after the data was drawn.

    Args:
        axes: the axes.
        which: "x" or "y".
    """
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_minpos(), axis.get_data_interval()[1]
    steps = next(steps for ratio, steps in TICK_STEPS if high < ratio * low)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in every if low / MARGIN <= tick <= high * MARGIN]
    getattr(axes, f"set_{which}lim")(low / MARGIN, high * MARGIN)
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}ticks")(ticks, [f"{tick:,.10g}" for tick in ticks])
    axes.minorticks_off()


def title_of(record: Record) -> str:
    """Return a record's model and card: ``v2lite, NVIDIA H200``; "" if it has neither."""
    conditions = record.get("conditions") or record
    model = conditions.get("model") or conditions.get("model_id") or ""
    card = conditions.get("card") or conditions.get("device") or ""
    name = Path(str(model).partition(",")[0]).name
    return ", ".join(part for part in (name, str(card)) if part)
