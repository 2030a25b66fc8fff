"""The charts of the pages, and the pages of ablations, from the records in docs/benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from glowplug.entrypoints.bench.ablation import tables
from glowplug.entrypoints.bench.plot import draw_together
from glowplug.entrypoints.bench.plots.catalogue import read_record

RECORDS = Path(__file__).resolve().parent / "benchmarks"
LITE, SLICE = "DeepSeek-V2-Lite, one H200", "DeepSeek-V3 slice, one H200"
#: file -> (chart, records with the titles of their panels; None: their own)
FIGURES: dict[str, tuple[str, dict[str, str | None]]] = {
    "plots/decode-h200.svg": ("decode", {"v2lite-h200.json": LITE, "v3slice-h200.json": SLICE}),
    "plots/floor-h200.svg": (
        "floor",
        {"v2lite-h200.json": "DeepSeek-V2-Lite", "v3slice-h200.json": "DeepSeek-V3 slice"},
    ),
    "plots/latency-h200.svg": ("latency", {"serving-h200.json": "DeepSeek-V2-Lite"}),
    "plots/percentiles-h200.svg": ("percentiles", {"serving-h200.json": "DeepSeek-V2-Lite"}),
    "plots/percentiles-draft-extend-h200.svg": (
        "percentiles",
        {"draft-extend-h200.json": "DeepSeek-V3 slice"},
    ),
    "plots/attention-h200.svg": ("kernels", {"attention-h200.json": None}),
    "plots/attention-mha-h200.svg": ("kernels", {"attention-mha-h200.json": None}),
    "plots/attention-verify-h200.svg": ("kernels", {"attention-verify-h200.json": None}),
    "plots/experts-fp8-h200.svg": ("kernels", {"experts-fp8-h200.json": None}),
    "plots/startup-h200.svg": ("startup", {"startup.json": LITE}),
    "plots/memory-h200.svg": (
        "memory",
        {"startup.json": "DeepSeek-V2-Lite", "memory-h200.json": "cut model"},
    ),
    "plots/soak-h200.svg": ("soak", {"soak-h200.json": "DeepSeek-V2-Lite"}),
}


def ablations() -> list[str]:
    """Return the names of the records of ablations, without their ending."""
    return sorted(path.stem for path in RECORDS.glob("ablation-*.json"))


def drawn() -> Iterator[tuple[Path, str]]:
    """Draw every chart; yield (file, its text), and the same for the pages of ablations."""
    figures = dict(FIGURES)
    for name in ablations():
        figures[f"{name}.svg"] = ("ablation", {f"{name}.json": None})
    with tempfile.TemporaryDirectory(prefix="glowplug-figures-") as folder:
        target = Path(folder) / "figure.svg"
        for name, (chart, titles) in figures.items():
            records = [(RECORDS / record, read_record(RECORDS / record)) for record in titles]
            draw_together(chart, records, list(titles.values()), target)
            yield RECORDS / name, target.read_text(encoding="utf-8")
    for name in ablations():
        document = read_record(RECORDS / f"{name}.json")
        yield RECORDS / f"{name}.md", tables.markdown(document, f"{name}.json", f"{name}.svg")
