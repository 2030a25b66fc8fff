"""``glowplug ablate``: rows, techniques, and tables of engines that run, are refused or fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.bench.ablation import command, record
from glowplug.entrypoints.bench.ablation.planning import plan_rows, technique_cells
from glowplug.entrypoints.bench.ablation.rows import (
    grid,
    one_at_a_time,
    parse_vary,
    read_rows,
    selected,
)
from glowplug.entrypoints.bench.ablation.techniques import (
    TECHNIQUES,
    compared_values,
    with_settings,
)
from glowplug.entrypoints.cli.main import main
from tests.support.source_tree import ROOT

#: an engine of one process, so that a fault of its rank is the process's
SMALL = ["--output-len", "6", "--repeat", "1", "--set", "executor.use=inline"]
V3 = "models/shapes/deepseek-v3.json"


def ablate(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run ``glowplug ablate`` with its result in ``folder``; return exit status and document."""
    output = folder / "ablation.json"
    status = main(["ablate", *SMALL, "--output-file", str(output), *words])
    return status, json.loads(output.read_text()) if output.exists() else {}


def by_label(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in document["rows"]}


# ---- rows and techniques -------------------------------------------------------------------------


def test_rows_of_a_grid_and_of_one_change_at_a_time() -> None:
    vary = dict(map(parse_vary, ["radix=on,off", "nextn=0,1"]))
    assert grid(vary) == [
        {"radix": "on", "nextn": "0"},
        {"radix": "on", "nextn": "1"},
        {"radix": "off", "nextn": "0"},
        {"radix": "off", "nextn": "1"},
    ]
    assert one_at_a_time(vary) == [
        {},
        {"radix": "on"},
        {"radix": "off"},
        {"nextn": "0"},
        {"nextn": "1"},
    ]
    assert selected("1-2,4", 5) == [1, 2, 4]
    with pytest.raises(ValueError, match="there are rows 1 to 5"):
        selected("6", 5)


def test_rows_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("base\n# a comment\ngraphs=off nextn=1  # two\n\nbase\n")
    assert read_rows(file) == [{}, {"graphs": "off", "nextn": "1"}]
    file.write_text("graphs=off graphs=on\n")
    with pytest.raises(ValueError, match="graphs is set twice"):
        read_rows(file)


def test_every_technique_changes_the_plan_and_its_cell() -> None:
    """On eight H200 each technique has two values whose plans differ, and whose cells do."""
    hardware = read_sheet("8xh200")
    plugins = load_plugins()
    base = {"model": V3, "weights": {"use": "random"}, "skip_tokenizer": True}
    base |= {"parallel": [{"use": "tensor", "size": 8}], "executor": {"use": "multiprocess"}}
    values = {"tp": ("8", "4"), "attention": ("triton_mla", "flashmla"), "nextn": ("0", "2/1/3")}
    for technique in TECHNIQUES:
        pair = values.get(technique.name) or compared_values(technique.name, plugins, V3)[:2]
        given = [
            # chunks of prompts beside steps of prompts alone: both fit in the sheet's memory
            with_settings(base, {technique.name: value})
            for value in pair
        ]
        if technique.name == "tp":
            given = [{**one, "model": "models/shapes/deepseek-v2-lite.json"} for one in given]
        plans = [make_plan(config, plugins=plugins, hardware=hardware) for config in given]
        assert plans[0].fingerprint != plans[1].fingerprint, technique.name
        assert technique.cell(plans[0]) != technique.cell(plans[1]), technique.name


def test_drafts_are_an_algorithm_with_a_size_and_a_folder() -> None:
    """Options of the configuration's own algorithm do not reach another one."""
    base = {"speculative": {"use": "nextn", "steps": 3, "adaptive": False, "draft_model": "layer"}}

    def changed(value: str) -> dict[str, object]:
        found: dict[str, object] = with_settings(base, {"drafts": value})["speculative"]
        return found

    assert changed("none") == {"use": "none", "adaptive": False}
    assert changed("ngram") == {"use": "ngram", "adaptive": False}
    assert changed("nextn") == base["speculative"]
    assert changed("nextn:1") == {**base["speculative"], "steps": 1}
    assert changed("standalone:2@/models/a:b") == {
        "use": "standalone",
        "adaptive": False,
        "steps": 2,
        "draft_model": "/models/a:b",
    }
    sizes = {"steps": 3, "topk": 4, "draft_tokens": 8}
    assert changed("eagle:3/4/8@head") == {
        "use": "eagle",
        "adaptive": False,
        "draft_model": "head",
        **sizes,
    }
    for value in ("eagle@", ":3", "nextn:1/2"):
        with pytest.raises(ValueError, match=f"drafts={value}: expected"):
            changed(value)
    with pytest.raises(ValueError, match="both choose the drafts"):
        with_settings(base, {"drafts": "ngram", "nextn": "1"})


def test_the_drafts_of_a_model_are_those_that_need_no_folder() -> None:
    """The embedded model comes with an EAGLE head, the shape of Llama has nothing to draft with."""
    plugins = load_plugins(entry_points=False)
    llama = "models/shapes/tiny-llama.json"
    assert compared_values("drafts", plugins, "embedded") == ("none", "nextn", "ngram", "eagle")
    assert compared_values("drafts", plugins, V3) == ("none", "nextn", "ngram")
    assert compared_values("drafts", plugins, llama) == ("none", "ngram")


def test_drafts_are_in_a_column_of_their_own() -> None:
    """The column NextN shows only drafts of that layer."""
    plugins = load_plugins(entry_points=False)
    base = {"model": "embedded", "speculative": {"adaptive": False}}
    rows = [{}, {"drafts": "ngram"}, {"drafts": "eagle:2/1/3"}, {"drafts": "standalone"}]
    none, ngram, eagle, refused = plan_rows(rows, base, plugins)
    cells = [technique_cells(row, none) for row in (none, ngram, eagle, refused)]
    assert cells[0]["drafts"] == "" and cells[1]["drafts"].startswith("ngram ")
    assert [one["nextn"] for one in cells] == ["", "", "", ""]
    assert (cells[2]["drafts"], cells[3]["drafts"]) == ("eagle 2/1/3", "standalone")
    assert any("no folder of one is given" in one.reason for one in refused.refusals)
    (nextn,) = plan_rows([{"drafts": "nextn:2"}], base, plugins)
    assert technique_cells(nextn, none) | {"drafts": "nextn 2/1/3", "nextn": "2/1/3"} == (
        technique_cells(nextn, none)
    )


def test_a_wrong_technique_or_value_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, said in (
        (["--vary", "graph"], "no technique 'graph': use tp, compile, graphs, radix"),
        (["--vary", "graphs=1"], "graphs=1: expected on or off, not '1' (on, off)"),
        (["--vary", "nextn=1/2"], "expected steps or STEPS/TOPK/TOKENS, not '1/2'"),
        (["--vary", "scheduler.chunk_size"], "scheduler.chunk_size=VALUE,VALUE"),
        (["--rows", "9", "--vary", "radix"], "there are rows 1 to 3"),
        (["--concurrency", "0"], "at least 1"),
        (["--shared-len", "8"], "--shared-len must be less than --input-len"),
    ):
        assert ablate(tmp_path, *words)[0] == 2, words
        assert said in capsys.readouterr().err, words


def test_a_file_of_something_else_is_not_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "ablation.json"
    other.write_text('{"results": []}')
    assert ablate(tmp_path, "--vary", "radix")[0] == 2
    assert "is not a result of `glowplug ablate`" in capsys.readouterr().err
    assert other.read_text() == '{"results": []}'


# ---- tables --------------------------------------------------------------------------------------


def test_algorithms_of_drafts_are_measured_beside_each_other(tmp_path: Path) -> None:
    values = "drafts=none,ngram:2"
    small = ["--queries", "1", "--concurrency", "--set", "speculative.adaptive=false"]
    status, document = ablate(tmp_path, "--vary", values, *small)
    rows = by_label(document)
    assert status == 0 and rows["drafts=none"]["status"] == "same plan"
    ngram = rows["drafts=ngram:2"]
    assert ngram["cells"]["drafts"] == "ngram 2/1/3" and ngram["cells"]["nextn"] == ""
    assert ngram["single"]["accept_length"] >= 1
    page = (tmp_path / "ablation.md").read_text()
    assert "ngram 2/1/3" in page and "| drafts" in page


def test_rows_that_run_and_rows_that_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each row has its plan's fingerprint, and figures or the plan's reason and fix."""
    fixed = "nextn=2 speculative.adaptive=false"  # adaptive drafts may choose none
    (table := tmp_path / "rows").write_text(f"base\nnextn=0\n{fixed}\ngraphs=on\n")
    words = ["--row-file", str(table), "--concurrency", "1", "2", "--queries", "2"]
    status, document = ablate(tmp_path, *words)
    assert status == 0
    rows = by_label(document)
    base, same, drafts, graphs = (rows[one] for one in ("base", "nextn=0", fixed, "graphs=on"))
    assert [one["status"] for one in (base, same, drafts, graphs)] == [
        "measured",
        "same plan",
        "measured",
        "refused",
    ]
    assert same["fingerprint"] == base["fingerprint"] != drafts["fingerprint"]
    assert same["same_as"] == "base" and graphs["fingerprint"] == ""
    assert base["single"]["tokens_per_s"] > 0 and base["single"]["accept_length"] is None
    assert 1.2 < drafts["single"]["accept_length"] <= 3
    assert drafts["single"]["answers"] == base["single"]["answers"]
    assert 0 < base["single"]["ttft_ms"] < base["single"]["latency_ms"]
    for row in (base, drafts):
        assert [one["concurrency"] for one in row["offline"]] == [1, 2]
        assert [one["requests"] for one in row["offline"]] == [2, 4]
        for level in row["offline"]:
            assert level["failed"] == 0
            tokens = level["total_input_tokens"] + level["total_output_tokens"]
            assert level["total_throughput"] == pytest.approx(tokens / level["duration"])
            assert 0 < level["median_ttft_ms"] <= level["p99_ttft_ms"]
        assert row["memory"]["engine"] > 30 << 20 and row["kv_tokens"] > 0
        assert row["startup_seconds"]["weights"] > 0
    assert base["cells"] == {**graphs["cells"], "graphs": ""} and graphs["cells"]["graphs"] == "x"
    assert drafts["cells"]["nextn"] == "2/1/3"
    (refusal,) = graphs["refusals"]
    page = (tmp_path / "ablation.md").read_text()
    assert page in capsys.readouterr().out
    assert f"1. {refusal['field']}: {refusal['reason']} (fix: {refusal['fix']})" in page
    assert page.count("refused [1]") == 3 and "nextn=0 (base)" in page
    assert f"{base['offline'][1]['total_throughput']:.1f} (" in page
    chart = (tmp_path / "ablation.svg").read_text()
    assert ">refused<" in chart and ">3. nextn=2" in chart and "![" in page


FAULTY = ["--plugin", "tests.e2e.fault_plugin", "--queries", "1"]


def test_a_crash_a_hang_and_an_exhausted_memory_are_cells_with_reasons(tmp_path: Path) -> None:
    """The next row runs all the same, and the exit status says that rows failed."""
    rows = tmp_path / "rows"
    faults = ("kill", "memory", "hang")
    faulty = f"weights.use=faulty weights.note={tmp_path / 'note'} weights.fault="
    rows.write_text("\n".join([*(faulty + fault for fault in faults), "base"]))
    words = [*FAULTY, "--row-file", str(rows), "--concurrency"]
    assert ablate(tmp_path, *words, "--rows", "1,2,4")[0] == 1
    status, document = ablate(tmp_path, *words, "--time-limit", "4")
    assert status == 1
    *failed, base = document["rows"]
    assert base["status"] == "measured" and base["row"] == "base"
    failures = [row["failure"] for row in failed]
    assert [one["phase"] for one in failures] == ["start"] * 3
    assert [one["kind"] for one in failures] == ["failed", "out of memory", "time limit"]
    assert "killed by SIGKILL" in failures[0]["reason"]
    assert failures[2]["reason"] == "did not end in 4 s"
    page = (tmp_path / "ablation.md").read_text()
    assert "out of memory [2]" in page and "time limit [3]" in page
    assert "start: killed by SIGKILL" in page


def test_results_before_a_failure_are_kept(tmp_path: Path) -> None:
    """An engine that fails at the second concurrency has the figures of the first one."""
    # a level of one request: 8 tokens to warm up and twice 6; the start samples a few more
    words = [*FAULTY, "--queries", "0", "--vary", "radix=on", "--concurrency", "1", "2", "4"]
    values = {"use": "faulty", "fault": "memory", "at": 30, "note": tmp_path / "note"}
    fault = [word for key in values for word in ("--set", f"sampling.{key}={values[key]}")]
    status, document = ablate(tmp_path, *words, *fault)
    (row,) = [one for one in document["rows"] if one["status"] == "failed"]
    assert status == 1 and [one["concurrency"] for one in row["offline"]] == [1]
    assert row["failure"]["phase"] == "concurrency 2"
    assert row["failure"]["kind"] == "out of memory"
    page = (tmp_path / "ablation.md").read_text()
    (line,) = [line for line in page.splitlines() if "(" in line and "| out of memory" in line]
    assert "out of memory [1]" in line and "not run [1]" in line


def test_options_of_a_section_keep_the_other_defaults(tmp_path: Path) -> None:
    """A refusal of every row is the command's."""
    words = ["--vary", "radix=off", "--set", "executor.oversubscribe=true", "--dry-run"]
    assert main(["ablate", "--output-file", str(tmp_path / "a.json"), *words]) == 0
    status, document = ablate(tmp_path, "--vary", "graphs=on", "--set", "graphs.use=cuda_graph")
    assert status == 2 and {row["status"] for row in document["rows"]} == {"refused"}


# ---- the same command again ----------------------------------------------------------------------

RESULTS = {"single": {"tokens_per_s": 5.0, "ttft_ms": 1.0, "answers": "", "accept_length": None}}
RESULTS |= {"offline": [], "memory": None, "seconds": 1.0}  # type: ignore[dict-item]


class Runs:
    """A stand-in for ``run_row`` that counts its calls; ``failure`` is the result's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.failure: dict[str, str] | None = None
        monkeypatch.setattr(command, "run_row", self)

    def __call__(self, config: object, load: object, limit: float) -> dict[str, Any]:
        self.count += 1
        return {**RESULTS, "failure": self.failure}


WORDS = ["--vary", "radix=off", "chunked=off", "--concurrency"]


def test_a_known_row_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with the same plan, versions and load: a change of any of them measures it again."""
    runs = Runs(monkeypatch)
    assert ablate(tmp_path, *WORDS)[0] == 0 and runs.count == 3
    _, document = ablate(tmp_path, *WORDS)
    assert runs.count == 3 and [one["status"] for one in document["rows"]] == ["measured"] * 3
    _, document = ablate(tmp_path, "--vary", "radix=off", "nextn=1", "--concurrency")
    assert runs.count == 4  # the base and radix=off are known; chunked=off is kept
    assert list(by_label(document)) == ["base", "radix=off", "nextn=1", "chunked=off"]
    ablate(tmp_path, *WORDS, "--seed", "5")
    assert runs.count == 7  # other plans
    ablate(tmp_path, *WORDS, "--seed", "5", "--output-len", "7")
    assert runs.count == 10  # another load
    monkeypatch.setattr(
        command, "conditions_apart", lambda: {**dict.fromkeys(record.VERSIONS), "packages": {}}
    )
    monkeypatch.setattr(command.tables, "_conditions", lambda document, record: "")
    ablate(tmp_path, *WORDS, "--seed", "5", "--output-len", "7")
    assert runs.count == 13  # other versions


def test_failed_rows_are_measured_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(monkeypatch)
    runs.failure = {"phase": "start", "kind": "failed", "reason": "no"}
    assert ablate(tmp_path, *WORDS)[0] == 1 and runs.count == 3
    assert ablate(tmp_path, *WORDS)[0] == 1 and runs.count == 3
    runs.failure = None
    assert ablate(tmp_path, *WORDS, "--retry-failed")[0] == 0 and runs.count == 6


def test_rows_beyond_the_minutes_or_the_selection_are_left_for_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(monkeypatch)
    status, document = ablate(tmp_path, *WORDS, "--max-minutes", "0")
    assert status == 0 and runs.count == 0
    assert [one["status"] for one in document["rows"]] == ["left out"] * 3
    assert (
        "Not measured yet: base, radix=off, chunked=off." in (tmp_path / "ablation.md").read_text()
    )
    _, document = ablate(tmp_path, *WORDS, "--rows", "2-3")
    assert runs.count == 2
    assert [one["status"] for one in document["rows"]] == ["left out", "measured", "measured"]
    _, document = ablate(tmp_path, *WORDS)
    assert runs.count == 3 and [one["status"] for one in document["rows"]] == ["measured"] * 3


def test_a_dry_run_prints_plans_and_refusals_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(monkeypatch)
    words = ["--vary", "radix=on", "attention=fa3", "--dry-run"]
    assert ablate(tmp_path, *words) == (0, {})
    base, same, refused = capsys.readouterr().out.splitlines()
    assert runs.count == 0 and base.startswith("1. base: plan ")
    assert same == "2. radix=on: same plan as row 1"
    assert refused.startswith("3. attention=fa3: refused: ")
    assert "attention.use: fa3_mla runs on cuda" in refused


def test_the_docs_list_every_technique() -> None:
    page = (ROOT / "docs" / "ablation.md").read_text()
    assert [one.name for one in TECHNIQUES if f"| `{one.name}` |" not in page] == []
