"""The charts, and the records that they are drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glowplug.entrypoints.bench import table
from glowplug.entrypoints.bench.plots.ablation import ablation_panels
from glowplug.entrypoints.bench.plots.kernels import kernel_panels
from glowplug.entrypoints.bench.plots.latency import latency_panels
from glowplug.entrypoints.bench.plots.panels import Chart, Record
from glowplug.entrypoints.bench.plots.percentiles import percentile_panels
from glowplug.entrypoints.bench.plots.soak import soak_panels
from glowplug.entrypoints.bench.plots.starts import memory_panels, start_panels
from glowplug.entrypoints.bench.plots.steps import decode_panels, floor_panels

CHARTS: tuple[Chart, ...] = (
    Chart("ablation", "speed of each row of `glowplug ablate`", ablation_panels),
    Chart("decode", "decode time against batch", decode_panels),
    Chart("floor", "share of the floor against batch", floor_panels, wrap=2),
    Chart("latency", "throughput against latency of servers", latency_panels, wrap=2),
    Chart(
        "percentiles",
        "percentiles of latencies, and goodput, against concurrency or request rate",
        percentile_panels,
        wrap=2,
    ),
    Chart("kernels", "time of kernels by provider", kernel_panels),
    Chart("startup", "phases of a start", start_panels, wrap=1),
    Chart("memory", "memory by name, planned and measured", memory_panels, wrap=2),
    Chart("soak", "memory over the time of a soak", soak_panels),
)


def read_record(path: Path) -> Record:
    """Return the record in a JSON file; results in JSON lines become ``{"results": [...]}``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither.
    """
    import orjson

    try:
        found: Any = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        found = {"results": table.read(path)}
    if isinstance(found, dict):
        return {"results": [found]} if "max_concurrency" in found else found
    raise ValueError(f"{path} is no record of a benchmark")


def charts_of(record: Record) -> list[Chart]:
    """Return the charts that a record can be drawn as."""
    return [chart for chart in CHARTS if chart.panels(record)]
