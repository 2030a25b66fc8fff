"""``glowplug bench plot``: charts from records, current in the docs, refused without matplotlib."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from glowplug.entrypoints.bench.plots.catalogue import CHARTS, charts_of, read_record
from glowplug.entrypoints.bench.plots.drawing import draw
from glowplug.entrypoints.cli.main import main
from tests.support.published import PAGES
from tests.support.source_tree import ROOT

RECORDS = ROOT / "docs" / "benchmarks"
FIGURES = sorted(RECORDS.rglob("*.svg"))
#: a unit in an axis label, or a number that has none
UNIT = re.compile(r", (ms|us|s|min|%|MiB|GiB|sequences)\b|tokens/s|^tokens$|^requests/s$")


def texts(figure: str) -> list[str]:
    """Return the texts of a chart."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", figure)


def drawn(record: dict[str, Any], name: str, folder: Path) -> str:
    (chart,) = (one for one in CHARTS if one.name == name)
    draw(chart.panels(record), folder / "chart.svg", chart.wrap)
    return (folder / "chart.svg").read_text()


def test_every_chart_is_drawn_for_the_docs_and_shown_in_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in FIGURES if f"{path.name})" not in pages] == []
    kinds = {"latency", "percentiles", "decode", "floor", "startup", "memory", "soak", "ablation"}
    assert {name for name in kinds if any(name in path.name for path in FIGURES)} == kinds
    assert any("attention" in path.name for path in FIGURES)
    assert {chart.name for chart in CHARTS} == kinds | {"kernels"}


def test_charts_are_small() -> None:
    assert sum(path.stat().st_size for path in FIGURES) < 1_000_000


@pytest.mark.parametrize("path", FIGURES, ids=[path.stem for path in FIGURES])
def test_a_chart_has_a_white_ground_units_and_no_date(path: Path) -> None:
    figure = path.read_text()
    assert "fill: #ffffff" in figure and "<dc:date>" not in figure
    labels = [text for text in texts(figure) if UNIT.search(text)]
    panels = len(re.findall(r'<g id="axes_\d+">', figure))
    assert len(labels) >= panels, labels


def test_equal_records_give_equal_files(tmp_path: Path) -> None:
    record = dict(read_record(RECORDS / "serving-h200.json"))
    assert drawn(record, "latency", tmp_path) == drawn(record, "latency", tmp_path)


def test_this_engine_is_first_and_the_floor_is_dashed(tmp_path: Path) -> None:
    """Whatever the order in the record; a table without floors has no floor."""
    record: dict[str, Any] = json.loads((RECORDS / "v2lite-h200.json").read_text())
    for rows in record["tables"].values():
        rows[:] = [dict(sorted(row.items(), key=lambda one: one[0] == "glowplug")) for row in rows]
    figure = drawn(record, "decode", tmp_path)
    named = [text for text in texts(figure) if text in ("glowplug", "SGLang", "vLLM", "floor")]
    assert named == ["glowplug", "SGLang", "vLLM", "floor"] and "stroke-dasharray" in figure
    for rows in record["tables"].values():
        for row in rows:
            del row["floor"]
    assert "floor" not in texts(drawn(record, "decode", tmp_path))
    assert "floor" not in {chart.name for chart in charts_of(record)}


def test_the_line_is_where_the_record_says(tmp_path: Path) -> None:
    """A step twice as long is drawn twice as high."""
    rows = [{"point": 1, "glowplug": 2.0}, {"point": 8, "glowplug": 4.0}]
    figure = drawn({"tables": {"decode step, ms": rows}}, "decode", tmp_path)
    (line,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: #1f5fa8; stroke-width: 2.2', figure)
    (_, first), (_, second) = re.findall(r"[ML] ([\d.]+) ([\d.]+)", line)
    (frame,) = re.findall(r'<g id="patch_2">\s*<path d="M [\d.]+ ([\d.]+)', figure)
    bottom = float(frame)
    assert (bottom - float(second)) == pytest.approx(2 * (bottom - float(first)))


def test_records_of_this_engines_own_benchmarks_are_drawn(tmp_path: Path) -> None:
    """``one-batch --save`` gives decode times, ``bench serving``'s JSON lines give latencies."""
    saved = tmp_path / "one.json"
    results = [
        {"batch_size": 8, "decode_median_ms": 3.0, "floor_ms": 1.0},
        {"batch_size": 1, "decode_median_ms": 2.0, "floor_ms": 1.0},
        {"batch_size": 32, "error": "out of memory"},
    ]
    saved.write_text(json.dumps({"model": "/models/lite", "card": "X", "results": results}))
    lines = tmp_path / "load.jsonl"
    run = {"mean_tpot_ms": 3.0, "mean_ttft_ms": 9.0, "output_throughput": 300.0}
    lines.write_text(
        "".join(json.dumps({**run, "max_concurrency": level}) + "\n" for level in (4, 1))
    )
    for path, names in ((saved, ["decode", "floor"]), (lines, ["latency"])):
        assert [chart.name for chart in charts_of(read_record(path))] == names
        assert main(["bench", "plot", str(path)]) == 0
    assert "lite, X" in texts((tmp_path / "one-decode.svg").read_text())
    assert {"1", "4"} <= set(texts((tmp_path / "load-latency.svg").read_text()))


def test_kernels_of_a_step_are_those_of_the_plan(tmp_path: Path) -> None:
    row = {"step": "decode 1", "slot": "ops", "us": 1.0}
    rows = [
        {**row, "kernel": "rope", "provider": "torch *", "step_us": 6.0},
        {**row, "kernel": "rope", "provider": "torch *", "step_us": 3.0},
        {**row, "kernel": "norm", "provider": "triton *", "step_us": 7.0},
        {**row, "kernel": "gate", "provider": "other", "step_us": 99.0},
    ]
    found = texts(drawn({"rows": rows}, "kernels", tmp_path))
    assert [text for text in found if text.startswith("ops")] == ["ops: rope", "ops: norm"]


def test_panels_of_several_files_are_drawn_together(tmp_path: Path) -> None:
    target = tmp_path / "both.svg"
    files = [str(RECORDS / name) for name in ("v2lite-h200.json", "v3slice-h200.json")]
    words = ["bench", "plot", *files, "--titles", "Lite", "Slice", "--together", str(target)]
    assert main([*words, "--chart", "decode"]) == 0
    assert {"Lite", "Slice"} <= set(texts(target.read_text()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cpu.json"], "cpu.json has figures for no chart"),
        (["v2lite-h200.json", "--chart", "soak"], "has figures for decode, floor, startup"),
        (["v2lite-h200.json", "--together", "x.svg"], "--together draws one chart: give --chart"),
        (["soak-h200.json", "--together", "x.txt"], "expected a name that ends in .svg"),
        (["soak-h200.json", "--titles", "a", "b"], "one value for each file"),
        (["none.json"], "No such file"),
    ],
)
def test_a_request_that_cannot_be_drawn_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "plot", str(RECORDS / words[0]), *words[1:]]) == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_charts_are_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = RECORDS / "soak-h200.json"
    assert main(["bench", "plot", str(record), "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "charts need matplotlib, which is not installed; fix: pip install -c" in said
    assert list(tmp_path.iterdir()) == []
