"""Padding of steps that groups of ranks run together: it costs no expert work, writes only to the
scratch page, and changes neither tokens nor accept lengths.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.engine.in_flight import InFlight
from glowplug.core.engine.runner import Runner
from glowplug.core.plugin.offers import Mode
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.batch import Batch
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.plugins.parallel.dp_attention_runtime import DpAttention
from glowplug.plugins.quantization.dense.layers import DenseExperts
from tests.support.layouts import layout
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import write_config

LAYOUTS = {
    "tp 2, dp 2": layout(2, dp=2),
    "tp 4, dp 2": layout(4, dp=2),
    "tp 2, ep 2, dp 2": layout(2, 2, 2, exchange="all_gather"),
    "tp 2, ep 2, dp 2, static": layout(2, 2, 2, exchange="all_to_all_static"),
    "tp 4, ep 2, dp 2": layout(4, 2, 2),
}
#: ranks that compute a (token, expert) pair, each a slice of the expert
COPIES = {"tp 2, dp 2": 2, "tp 4, dp 2": 4, "tp 4, ep 2, dp 2": 2}
PROMPTS = {1: [5, 6, 7], 2: [9], 3: [4, 8, 15, 16, 23, 42, 7], 4: [11, 12], 5: [3, 1, 4, 1, 5]}
ONE = {1: [5, 6, 7, 8, 9]}


ALONE: dict[tuple[int, int], dict[str, Any]] = {}  #: one rank's results, by drafts and requests


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)


class Pairs:
    """The number of (token, expert) pairs that all ranks have computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        lock = threading.Lock()
        apply = DenseExperts.apply

        def counted(method: DenseExperts, x: Any, ids: torch.Tensor, weights: Any) -> torch.Tensor:
            with lock:
                self.count += int((ids >= 0).sum())
            return apply(method, x, ids, weights)

        monkeypatch.setattr(DenseExperts, "apply", counted)


def config_of(
    folder: Path, parallel: list[dict[str, Any]], nextn: int, replays: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 1024},
        "weights": {"use": "random"},
        "scheduler": {"overlap": False, "max_running_requests": 12, "chunk_size": 32},
        "graphs": {"use": "eager"},
    }
    if replays:
        config["graphs"] = {"use": "replaying", "batch_sizes": [4, 12]}
    if parallel:
        config["parallel"] = parallel
    if nextn:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": nextn}
    return config


def run(
    config: dict[str, Any], plugins: PluginSet, pairs: Pairs, prompts: dict[int, list[int]]
) -> dict[str, Any]:
    """Return tokens, drafts and expert work of the requests, and pages that idle groups wrote."""
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        pairs.count = 0
        before = [_written(engine) for engine in ranks.engines]
        heard = ranks.run([submit(id, prompt, 12) for id, prompt in prompts.items()])
        ranks.check_idle()
        ranks_info = ranks.control("info").data.get("ranks", [])
        loads = [rank.get("expert_load", {}) for rank in ranks_info]
        return {
            "tokens": {id: list(one.tokens) for id, one in heard.items()},
            "drafted": sum(stats.drafted_tokens for stats in ranks.stats.values()),
            "accepted": sum(stats.accepted_tokens for stats in ranks.stats.values()),
            "pairs": pairs.count,
            "written": [_written(engine) - old for engine, old in zip(ranks.engines, before)],
            "load": sum(sum(counts) for load in loads for counts in load.values()),
            "steps": [ranks.stats[group].steps for group in sorted(ranks.stats)],
        }


def run_alone(
    folder: Path, nextn: int, plugins: PluginSet, pairs: Pairs, prompts: dict[int, list[int]]
) -> dict[str, Any]:
    """Return the results of one rank, which pads nothing."""
    key = (nextn, len(prompts))
    if key not in ALONE:
        ALONE[key] = run(config_of(folder, [], nextn, False), plugins, pairs, prompts)
    return ALONE[key]


def _written(engine: Any) -> int:
    """Return the number of cached entries outside the scratch page that are not zero."""
    page = engine.runner.table.page_size
    return sum(
        int((entry[page:] != 0).any(-1).sum())
        for layer in engine.runner.attention._kv
        for entry in layer.values()
    )


@pytest.mark.parametrize("replays", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(
    ("layout", "nextn"),
    some_slow_rows(
        [(layout, nextn) for layout in LAYOUTS for nextn in (0, 1, 3)],
        # one step of drafts pads as several do
        [(layout, 1) for layout in LAYOUTS if layout != "tp 2, ep 2, dp 2"],
    ),
)
def test_padding_costs_no_expert_work_and_changes_no_result(
    tmp_path: Path,
    plugins: PluginSet,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    nextn: int,
    replays: bool,
) -> None:
    """Ranks compute the (token, expert) pairs of one rank that pads nothing, and no others."""
    pairs = Pairs(monkeypatch)
    folder = write_config(tmp_path, "v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    alone = run_alone(folder, nextn, plugins, pairs, PROMPTS)
    found = run(config_of(folder, LAYOUTS[layout], nextn, replays), plugins, pairs, PROMPTS)
    for same in ("tokens", "drafted", "accepted"):
        assert found[same] == alone[same], same
    assert found["pairs"] == COPIES.get(layout, 1) * alone["pairs"]
    assert min(found["steps"]) > 0, "both groups had requests"
    if "ep" in layout:
        assert found["load"] == alone["pairs"], "padding is not counted as load of the experts"


@pytest.mark.parametrize("replays", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("nextn", [0, 3])
@pytest.mark.parametrize("layout", ["tp 2, dp 2", "tp 2, ep 2, dp 2", "tp 4, ep 2, dp 2"])
def test_an_idle_group_computes_nothing_and_writes_to_the_scratch_page_only(
    tmp_path: Path,
    plugins: PluginSet,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    nextn: int,
    replays: bool,
) -> None:
    pairs = Pairs(monkeypatch)
    folder = write_config(tmp_path, "v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    alone = run_alone(folder, nextn, plugins, pairs, ONE)
    found = run(config_of(folder, LAYOUTS[layout], nextn, replays), plugins, pairs, ONE)
    assert found["tokens"] == alone["tokens"] and found["steps"][1] == 0
    assert found["pairs"] == COPIES.get(layout, 1) * alone["pairs"]
    half = len(found["written"]) // 2
    assert min(found["written"][:half]) > 0
    assert set(found["written"][half:]) == {0}, "an idle group wrote outside the scratch page"


@pytest.mark.parametrize("nextn", [0, 2])
def test_mixed_steps_have_no_more_tokens_than_the_engine_may_compute(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch, nextn: int
) -> None:
    """One group computes a long prompt while the other decodes: padded, their tokens stay within
    the engine's chunk and running sequences.
    """
    folder = write_config(tmp_path, "v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    config = config_of(folder, LAYOUTS["tp 2, dp 2"], nextn, False)
    config["scheduler"] = {"overlap": False, "max_running_requests": 6, "chunk_size": 16}
    sizes = rank_plan(config, plugins).sizes
    gathered: list[int] = []
    modes: dict[int, list[Mode]] = {}
    leave, launch = DpAttention.leave_attention, Runner.launch

    def left(strategy: DpAttention, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        found = leave(strategy, x, batch)
        gathered.append(len(found))
        return found

    def launched(runner: Runner, batch: Batch) -> InFlight:
        modes.setdefault(id(runner), []).append(batch.mode)
        return launch(runner, batch)

    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        monkeypatch.setattr(DpAttention, "leave_attention", left)
        monkeypatch.setattr(Runner, "launch", launched)
        ranks.turn([submit(1, [5, 6], 30)])
        ranks.turn([submit(2, list(range(2, 42)), 4), submit(3, [7] * 3, 20)])
        ranks.run()
        ranks.check_idle()
    first, second = modes.values()
    decode = Mode.VERIFY if nextn else Mode.DECODE
    assert {(decode, Mode.PREFILL), (Mode.PREFILL, decode)} & set(zip(first, second))
    assert max(gathered) <= sizes.groups * sizes.max_step_tokens
    assert sizes.groups * sizes.max_step_tokens == 16 + 6 * (1 + nextn)
