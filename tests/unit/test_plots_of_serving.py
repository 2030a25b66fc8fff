"""``bench plot`` of servers under load: a line for each setting, percentiles and goodput."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from glowplug.entrypoints.bench.load import metrics
from glowplug.entrypoints.bench.load.backends import Outcome
from glowplug.entrypoints.bench.plots.catalogue import CHARTS, charts_of, read_record
from glowplug.entrypoints.bench.plots.drawing import draw
from glowplug.entrypoints.bench.plots.serving_runs import runs_of
from glowplug.entrypoints.cli.main import main
from tests.support.source_tree import ROOT

RECORDS = ROOT / "docs" / "benchmarks"


def outcome(level: int | None, **figures: Any) -> dict[str, Any]:
    """Return a result of ``bench serving`` of eight requests with latencies of 10 to 80 ms."""
    outcomes = [
        Outcome(4, start=0.0, end=0.1 + at, arrivals=[at, at + 0.1], output_tokens=2)
        for at in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
    ]
    record = metrics.measure(outcomes, 2.0, percentiles=(90, 95, 99))
    return {**record, "backend": "glowplug", "max_concurrency": level, **figures}


def drawn(record: dict[str, Any], name: str, folder: Path) -> str:
    """Draw a chart of a record and return its SVG."""
    (chart,) = (one for one in CHARTS if one.name == name)
    draw(chart.panels(record), folder / "chart.svg", chart.wrap)
    return (folder / "chart.svg").read_text()


def texts(figure: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", figure)


def headings(record: dict[str, Any], name: str) -> list[str]:
    (chart,) = (one for one in CHARTS if one.name == name)
    return [panel.heading for panel in chart.panels(record)]


@pytest.mark.parametrize("name", ["latency", "percentiles"])
def test_settings_of_a_sweep_are_lines_of_their_own(name: str, tmp_path: Path) -> None:
    record = dict(read_record(RECORDS / "draft-extend-h200.json"))
    settings = ["graphs.draft_extend=false", "graphs.draft_extend=true"]
    assert {line: len(runs) for line, runs in runs_of(record).items()} == dict.fromkeys(settings, 2)
    legend = [text for text in texts(drawn(record, name, tmp_path)) if "draft_extend" in text]
    assert [text.split()[0] for text in legend[:1] + legend[-1:]] == settings


def test_lines_of_results_are_named_by_setting_tag_or_server() -> None:
    """Results of one server with several tags are as many lines; an empty setting has a name."""
    results = [
        outcome(4, tag="cold"),
        outcome(1, tag="cold"),
        outcome(1, tag="warm"),
        outcome(1, backend="vllm"),
        outcome(1),
        outcome(1, setting="", tag="warm"),
    ]
    found = runs_of({"results": results})
    assert list(found) == ["glowplug", "cold", "warm", "vllm", "as configured"]
    assert [run["max_concurrency"] for run in found["cold"]] == [1, 4]


def test_percentiles_have_a_panel_for_each_latency(tmp_path: Path) -> None:
    record = {"results": [outcome(level) for level in (1, 4, 16)], "model": "/models/lite"}
    figure = texts(drawn(record, "percentiles", tmp_path))
    latencies = ["TTFT", "TPOT", "ITL", "end-to-end latency"]
    assert headings(record, "percentiles") == [f"lite: {name}" for name in latencies]
    assert {f"{name}, ms" for name in latencies} <= set(figure)
    assert figure[-4:] == ["p50", "p90", "p95", "p99"]
    assert figure.count("most requests in flight") == 4 and {"1", "4", "16"} <= set(figure)


def test_percentiles_are_where_the_record_says(tmp_path: Path) -> None:
    """On the logarithmic axis the 99th percentile is as far above the median as their ratio."""
    run = {
        "mean_tpot_ms": 1.0,
        "mean_ttft_ms": 1.0,
        "median_ttft_ms": 10.0,
        "p90_ttft_ms": 100.0,
        "p99_ttft_ms": 1000.0,
    }
    record = {"results": [{**run, "max_concurrency": level} for level in (1, 8)]}
    lines = re.findall(
        r'<path d="M [\d.]+ ([\d.]+) \s*L [\d.]+ ([\d.]+) \s*" clip-path[^>]*#1f5fa8',
        drawn(record, "percentiles", tmp_path),
    )
    median, p90, p99 = (float(first) for first, _ in lines)
    assert median - p90 == pytest.approx(p90 - p99) and median - p90 > 10
    assert all(first == last for first, last in lines)


def test_one_percentile_has_the_same_dashes_in_every_panel(tmp_path: Path) -> None:
    """Older records have the median of some latencies only."""
    run = {"mean_tpot_ms": 1.0, "median_ttft_ms": 1.0, "p99_ttft_ms": 2.0, "p99_itl_ms": 3.0}
    record = {"results": [{**run, "max_concurrency": level} for level in (1, 8)]}
    figure = drawn(record, "percentiles", tmp_path)
    dashes = re.findall(r'clip-path[^>]*style="fill: none; stroke-dasharray: ([\d.,]+)', figure)
    assert len(dashes) == 2 and len(set(dashes)) == 1


def test_the_rate_is_the_axis_where_it_varies(tmp_path: Path) -> None:
    rated = [outcome(64, request_rate=rate) for rate in (2, 8)]
    assert "requests sent per second" in texts(drawn({"results": rated}, "percentiles", tmp_path))
    at_once = [outcome(None, request_rate="inf", concurrency=number) for number in (3.14159, 7.5)]
    figure = texts(drawn({"results": at_once}, "percentiles", tmp_path))
    assert "requests in flight, mean" in figure and {"3.1", "7.5"} <= set(figure)


def test_goodput_is_drawn_beside_all_requests_with_its_limits(tmp_path: Path) -> None:
    limits = {"goodput_limits_ms": {"ttft": 50.0, "tpot": 200.0}}
    results = [
        outcome(level, request_goodput=good, request_throughput=4.0, **limits)
        for level, good in ((1, 4.0), (8, 0.0))
    ]
    record = {"results": results}
    assert headings(record, "percentiles")[-1] == "goodput at TTFT 50 ms, TPOT 200 ms"
    figure = texts(drawn(record, "percentiles", tmp_path))
    assert {"requests/s", "within the limits", "all requests"} <= set(figure)
    without = {"results": [outcome(1)]}
    assert "goodput" not in headings(without, "percentiles")[-1]


def test_the_record_has_the_limits_of_goodput() -> None:
    done = [Outcome(1, end=0.1, arrivals=[0.02, 0.1], output_tokens=2)]
    record = metrics.measure(done, 1.0, goodput={"ttft": 50.0})
    assert record["goodput_limits_ms"] == {"ttft": 50.0} and record["request_goodput"] == 1.0
    assert metrics.measure(done, 1.0)["goodput_limits_ms"] is None


def test_latencies_that_no_request_has_are_left_out(tmp_path: Path) -> None:
    """One output token has no TPOT; a run without an answer has no point."""
    lines = tmp_path / "one.jsonl"
    ones = [Outcome(4, start=0.0, end=0.1, arrivals=[0.1], output_tokens=1)]
    record = {**metrics.measure(ones, 1.0), "max_concurrency": 1}
    failed = {**metrics.measure([Outcome(4, error="refused")], 1.0), "max_concurrency": 2}
    lines.write_text("".join(f"{json.dumps(one)}\n" for one in (record, failed)))
    read = dict(read_record(lines))
    assert [chart.name for chart in charts_of(read)] == ["latency", "percentiles"]
    assert headings(read, "percentiles") == ["TTFT", "end-to-end latency"]
    assert len(headings(read, "latency")) == 1
    assert main(["bench", "plot", str(lines)]) == 0
