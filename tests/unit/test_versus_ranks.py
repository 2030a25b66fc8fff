"""`bench versus` with several ranks: flags of each engine, floors with exchanges, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.weight_classes import EXPERTS
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.bench import peers
from glowplug.entrypoints.bench.others.floor import known_card, prefill_work, step_bytes
from glowplug.entrypoints.bench.others.layout import ONE_GPU, RankLayout
from glowplug.entrypoints.bench.others.peer_engines import ENGINES, ServedRun, StaticRun
from glowplug.entrypoints.bench.ranks.exchange_times import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    REDUCE_SCATTER,
    CountedExchange,
    ExchangeTimes,
    step_exchanges,
)
from glowplug.entrypoints.cli.main import main
from tests.support.reading import declared
from tests.support.source_tree import ROOT
from tests.support.tiny import write_config

LONG = 10**6  #: tokens, enough for every expert to be picked


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def facts_of(name: str, plugins: PluginSet, folder: Path) -> ModelFacts:
    return plugins.read_model(str(write_config(folder, name))).facts


# ---- command lines -------------------------------------------------------------------------------


def flags(words: list[str]) -> dict[str, str | None]:
    """Return each option with its first value, None for a switch."""
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


TENSOR = {
    "glowplug": {"--tp-size": "2"},
    "sglang": {"--tp-size": "2"},
    "vllm": {"--tensor-parallel-size": "2"},
}
EXPERTS_TOO = {
    "glowplug": {"--tp-size": "2", "--ep-size": "2"},
    "sglang": {"--tp-size": "2", "--ep-size": "2"},
    "vllm": {"--tensor-parallel-size": "2", "--enable-expert-parallel": None},
}
GROUPS = {
    "glowplug": {"--tp-size": "4", "--ep-size": "4", "--dp-size": "2"},
    "sglang": {
        "--tp-size": "4",
        "--ep-size": "4",
        "--dp-size": "2",
        "--enable-dp-attention": None,
    },
    "vllm": {
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "2",
        "--enable-expert-parallel": None,
    },
}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (RankLayout(), {"glowplug": {}, "sglang": {}, "vllm": {}}),
        (RankLayout(2), TENSOR),
        (RankLayout(2, 2), EXPERTS_TOO),
        (RankLayout(4, 4, 2), GROUPS),
    ],
)
def test_every_engine_gets_the_layout_in_its_own_flags(
    layout: RankLayout, expected: dict[str, dict[str, str | None]]
) -> None:
    every = {name for found in GROUPS.values() for name in found}
    served = ServedRun("/m", 31000, 256, 4096, layout)
    static = StaticRun("/m", (1,), 512, 64, 1000, 3, Path("/x.json"), layout)
    for name, wanted in expected.items():
        runs = [ENGINES[name].server(served)]
        runs += [ENGINES[name].static(static)] if layout.groups == 1 else []
        for words in runs:
            given = {flag: value for flag, value in flags(words).items() if flag in every}
            assert given == wanted


# ---- a comparison --------------------------------------------------------------------------------

#: stand-in for vLLM: each step takes 10 ms of its own clock
VLLM = """
import time
now = 0.0
time.perf_counter = lambda: now
class SamplingParams:
    def __init__(self, **given):
        self.tokens = given["max_tokens"]
class Engine:
    def step(self):
        global now
        now += 0.01
class LLM:
    def __init__(self, model, **settings):
        assert (settings["tensor_parallel_size"], settings["enable_expert_parallel"]) == (2, True)
        self.llm_engine = Engine()
    def generate(self, prompts, params, use_tqdm):
        for _ in range(params.tokens):
            self.llm_engine.step()
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """An interpreter with the stand-in."""
    site, script = tmp_path / "site", tmp_path / "vllm"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(VLLM)
    (site / "vllm-0.0.2.dist-info").mkdir()
    (site / "vllm-0.0.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.2\n"
    )
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def test_two_ranks_beside_a_peer_one_gpu_and_the_floor(
    vllm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    out = tmp_path / "out"
    model = str(write_config(tmp_path / "model", "v3"))
    words = ["bench", "versus", "--model", model, "--tp", "2", "--ep", "2", "--one-gpu"]
    words += ["--batch-size", "1", "2", "--input-len", "12", "--output-len", "20", "--repeat", "1"]
    words += ["--peer", f"vllm={vllm}", "--output-dir", str(out)]
    on_cpu = "--device cpu --set weights.use=random --set executor.oversubscribe=true"
    words += ["--options", f"glowplug={on_cpu}", "--options", "glowplug.static=--bandwidth 0.01"]
    words += ["--options", "glowplug.collectives=--collective-bytes 64 4096 --exchange-tokens 8"]
    status = main(words)
    said = capsys.readouterr()
    assert status == 0, said.err
    record = json.loads((out / "static.json").read_text())
    times = ExchangeTimes.read(out / "collectives.json")
    ours = json.loads((out / "static-glowplug.json").read_text())
    for row, measured in zip(record["tables"]["decode step, ms"], ours["results"]):
        assert row["vllm"] == pytest.approx(10.0) and row[ONE_GPU] > 0
        assert row["times_best_peer"] == pytest.approx(10.0 / row["glowplug"])
        assert row["times_one_gpu"] == pytest.approx(row[ONE_GPU] / row["glowplug"])
        sums = CountedExchange(ALL_REDUCE, 2, row["point"] * 64 * 2, 6)
        assert measured["floor_exchange_ms"] == pytest.approx(6e3 * times.seconds(sums))
        read = measured["floor_gb"] * 1e9 / 0.01e12
        assert row["floor"] == pytest.approx(1e3 * read + measured["floor_exchange_ms"])
    conditions = record["conditions"]
    assert conditions["layout"] == {"tp": 2, "ep": 2}
    assert "exchanges of a step as measured: collectives.json (" in conditions["floor"]
    assert "--tp-size 2 --ep-size 2" in conditions["commands"]["glowplug, static"]
    assert "--tp-size" not in conditions["commands"][f"{ONE_GPU}, static"]
    assert "--collectives" in conditions["commands"]["glowplug, collectives"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tp", "4", "--ep-size", "3"), "--ep-size 3 does not divide the 4 ranks of --tp-size"),
        (("--tp", "4", "--dp", "8"), "--dp-size 8 does not divide the 4 ranks"),
        (("--tp", "0"), "must be at least 1"),
        (("--tp", "4", "--ep", "2", "--peer", "vllm=python"), "give --ep-size 4, or leave vllm"),
        (
            ("--tp", "2", "--dp", "2", "--peer", "sglang=python"),
            "give --batch-size without a value",
        ),
        (("--one-gpu",), "give --tp-size 2, or more"),
        (("--options", "sglang=--x"), "sglang is not measured; give --peer sglang=PYTHON"),
        (("--options", "one_gpu=--x"), "one_gpu is not measured; give --one-gpu"),
        (("--options", "vllm.collectives=--x"), "and KIND one of static, serving"),
        (("--tp", "2", "--exchange-times", "/nowhere.json"), "/nowhere.json"),
        (("--tp", "2", "--exchange-times", "{folder}/bad.json"), "no record of `bench kernels"),
        (("--tp", "4", "--exchange-times", "{folder}/two.json"), "has no all_reduce of 4 ranks"),
    ],
)
def test_layouts_without_a_comparison_are_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("[]")
    two = {"operation": ALL_REDUCE, "ranks": 2, "bytes": 1, "tokens": 0, "us": 1.0}
    record = {"rows": [two], "date": "today", "card": "none"}
    (tmp_path / "two.json").write_text(json.dumps(record))
    given = [word.format(folder=tmp_path) for word in words]
    out = tmp_path / "out"
    assert main(["bench", "versus", "--model", "embedded", "--output-dir", str(out), *given]) == 2
    assert said in capsys.readouterr().err and not out.exists()


def test_one_gpu_is_no_peer() -> None:
    points = {"glowplug": 2.0, ONE_GPU: 3.0, "vllm": 4.0}
    tables = peers.comparison(
        {
            name: {8: {"decode_ms": value, "prefill_tokens_per_s": value}}
            for name, value in points.items()
        }
    )
    (step,) = tables["decode step, ms"]
    (prefill,) = tables["prefill, tokens/s"]
    assert (step["times_best_peer"], step["times_one_gpu"]) == (2.0, 1.5)
    assert (prefill["times_best_peer"], prefill["times_one_gpu"]) == (0.5, 2.0 / 3.0)


# ---- floors --------------------------------------------------------------------------------------

MESHES: tuple[dict[str, int], ...] = (
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "ep": 2},
    {"tp": 4, "ep": 4, "dp": 2},
    {"tp": 4, "dp": 4},
)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["v2", "v3", "llama", "v3_fp8"])
def test_with_every_expert_picked_a_rank_reads_its_part_of_every_matrix(
    name: str, mesh: dict[str, int], plugins: PluginSet, tmp_path: Path
) -> None:
    """The parts are those by which the plan counts the weights of a rank."""
    facts = facts_of(name, plugins, tmp_path)
    within = mesh["tp"] // mesh.get("dp", 1)
    shared = within if "ep" in mesh else mesh["tp"]
    parts = {
        "vocab": within,
        "tied": within,
        "heads": within,
        "kv_up": within,
        "kv_heads": min(within, facts.num_kv_heads),
        "width": mesh["tp"],
        "shared": shared,
        "experts": mesh["tp"],
    }
    matrices = 0.0
    for kind, count in declared(facts).items():
        if kind.draft < 0 and not kind.scale:
            held = count // 2 if kind.role == "vocab" else count
            matrices += held * (1 if kind.kept == 1 else 2) / parts.get(kind.role, 1)
    vectors = 2 * facts.hidden_size * (2 * facts.num_layers + 2) + 4096
    found = step_bytes(facts, LONG, 0, mesh=mesh)
    assert matrices - vectors <= found.total <= matrices * 1.0003 + 1
    experts = sum(count for kind, count in declared(facts).items() if kind.role == EXPERTS)
    width = 1 + 4 / 128**2 if name == "v3_fp8" else 2
    assert found.experts == pytest.approx(width * experts / mesh["tp"], rel=1e-3)


def test_a_rank_reads_the_cache_of_its_group(plugins: PluginSet, tmp_path: Path) -> None:
    latent = facts_of("v3", plugins, tmp_path / "v3")
    heads = facts_of("llama", plugins, tmp_path / "llama")
    one = step_bytes(latent, 8, 10).kv
    assert step_bytes(latent, 8, 10, mesh={"tp": 4}).kv == one, "every rank has the latent"
    assert step_bytes(latent, 8, 10, mesh={"tp": 4, "dp": 4}).kv == one / 4
    assert step_bytes(latent, 7, 10, mesh={"tp": 4, "dp": 4}).kv == one / 4, "the fullest group"
    assert step_bytes(heads, 8, 10, mesh={"tp": 4}).kv == step_bytes(heads, 8, 10).kv / 2


def test_ranks_share_the_work_of_a_prefill(plugins: PluginSet, tmp_path: Path) -> None:
    card = known_card("NVIDIA H200")
    assert card is not None
    facts = facts_of("v3", plugins, tmp_path)
    work = prefill_work(facts, 4096, 512).seconds(card.rates)
    assert card.prefill(facts, 4096, 512) == work
    assert replace(card, mesh={"tp": 4}).prefill(facts, 4096, 512) == work / 4


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({}, []),
        ({"tp": 4}, [(ALL_REDUCE, 4, 6 * 128, 6)]),
        ({"tp": 4, "ep": 4}, [(ALL_REDUCE, 4, 6 * 128, 6)]),
        (
            {"tp": 4, "ep": 4, "dp": 2},
            [
                (ALL_REDUCE, 2, 3 * 128, 3),
                (EXCHANGE, 4, 2, 2),
                (ALL_GATHER, 2, 6 * 128, 1),
                (REDUCE_SCATTER, 2, 6 * 128, 1),
            ],
        ),
        ({"tp": 2, "dp": 2}, [(ALL_GATHER, 2, 6 * 128, 3), (REDUCE_SCATTER, 2, 6 * 128, 3)]),
    ],
)
def test_exchanges_of_a_step(
    mesh: dict[str, int],
    expected: list[tuple[str, int, int, int]],
    plugins: PluginSet,
    tmp_path: Path,
) -> None:
    """Three layers, two of them with routed experts, and six sequences of 64 numbers a token."""
    found = list(step_exchanges(facts_of("v3", plugins, tmp_path), mesh, 6))
    assert found == [CountedExchange(*one) for one in expected]


def test_times_are_the_fastest_provider_s_and_interpolated() -> None:
    def row(size: int, us: float, **more: Any) -> dict[str, Any]:
        return {"operation": ALL_REDUCE, "ranks": 2, "bytes": size, "tokens": 0, "us": us, **more}

    rows = [row(100, 4.0), row(100, 3.0), row(300, 5.0), row(1000, 10.0, ranks=4)]
    rows.append(row(7, 9.0, operation=EXCHANGE, tokens=128))
    times = ExchangeTimes(rows, "here")

    def us(size: int, operation: str = ALL_REDUCE) -> float:
        return times.seconds(CountedExchange(operation, 2, size, 1)) * 1e6

    assert [us(size) for size in (1, 100, 200, 300, 600)] == pytest.approx([3, 3, 4, 5, 10])
    assert us(128, EXCHANGE) == pytest.approx(9.0)
    rows.append(row(7, 8.0, operation=f"{EXCHANGE} (fp8_group128)", tokens=128))
    times = ExchangeTimes(rows, "here")
    assert us(128, EXCHANGE) == pytest.approx(8.0), "in whatever format the tokens are sent"
    with pytest.raises(ValueError, match=r"here has no all_gather of 2 ranks: .*--tp 2"):
        us(1, ALL_GATHER)


def test_a_served_floor_includes_the_exchanges(plugins: PluginSet, tmp_path: Path) -> None:
    card = known_card("NVIDIA H200")
    assert card is not None
    facts = facts_of("v3", plugins, tmp_path)
    row = {"operation": ALL_REDUCE, "ranks": 2, "bytes": 1, "tokens": 0, "us": 2.0}
    two = replace(card, mesh={"tp": 2})
    with_times = replace(two, exchanges=ExchangeTimes([row | {"bytes": 1 << 30}], "here"))
    bare, full = (one.served(facts, 8, 100, 20)["mean_tpot_ms"] for one in (two, with_times))
    assert full == pytest.approx(bare + 6 * 2e-3)
