"""Chart of a soak: memory in each pause, over the time under load.

Record: ``bench soak --output-file``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.entrypoints.bench.plots.panels import (
    COLORS,
    OURS_COLOR,
    Axes,
    Panel,
    Record,
)

GIB = 1 << 30
#: key of a sample -> label
DEVICE = {
    "device_process": "process, by the driver",
    "device_claimed": "torch, reserved",
    "device_held": "torch, allocated",
}
HOST = {"host": "host"}


def soak_panels(record: Record) -> list[Panel]:
    """Return the panels of device and host memory; [] for other records."""
    samples = record.get("samples")
    if not isinstance(samples, list) or not samples or "loaded" not in samples[0]:
        return []
    panels = []
    for what, keys, colors in (
        ("device", DEVICE, (OURS_COLOR, *COLORS)),
        ("host, first rank", HOST, COLORS[2:]),
    ):
        shown = {key: label for key, label in keys.items() if all(one.get(key) for one in samples)}
        if shown:
            panels.append(Panel("", _drawing(samples, shown, colors), what))
    return panels


def _drawing(
    samples: Sequence[Mapping[str, Any]], keys: Mapping[str, str], colors: Sequence[str]
) -> Any:
    """Return the drawing of some figures of the samples.

    Args:
        samples: the samples.
        keys: labels of the figures, by key.
        colors: a colour for each.
    """

    def draw(axes: Axes) -> None:
        for (key, label), color in zip(keys.items(), colors):
            axes.plot(
                [one["loaded"] / 60 for one in samples],
                [one[key] / GIB for one in samples],
                label=label,
                color=color,
                marker="o",
                markersize=3,
                linewidth=1.6,
            )
        axes.set_ylim(0, 1.12 * max(one[key] / GIB for one in samples for key in keys))
        axes.set_xlim(left=0)
        axes.set_xlabel("time under load, min")
        axes.set_ylabel("memory, GiB")

    return draw
