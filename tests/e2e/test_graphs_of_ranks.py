"""Ranks that replay captured steps give one rank's tokens, in every layout.

Graphs are functions here (tests.plugins.replaying): padding, filling and the order of captures are
those of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM
from glowplug.core.errors import CaptureError, EngineDead
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from tests.support.forked_ranks import rank_processes
from tests.support.layouts import layout
from tests.support.slow_cases import some_slow, some_slow_rows
from tests.support.tiny import write_config

LAYOUTS = {
    "tp 2": layout(2),
    "tp 2, ep 2": layout(2, 2),
    "tp 2, dp 2": layout(2, dp=2),
    "tp 2, ep 2, dp 2": layout(2, 2, 2, exchange="all_to_all_static"),
    "tp 2, ep 2, dp 2, copies of experts": layout(2, 2, 2, redundant_experts=4),
    "tp 4, ep 2, dp 2": layout(4, 2, 2),
    "tp 8, ep 8, dp 2": layout(8, 8, 2),
}
SLOW = ("tp 2, dp 2", "tp 8, ep 8, dp 2")  #: 3 to 6 s a test of the latter
DRAFTS = [(0, 1), (1, 1), (3, 1), (2, 3)]  #: (steps, topk)
DRAFT_ROWS = [(layout, *drafts) for layout in LAYOUTS for drafts in DRAFTS]
#: one step is drafted as three are, so it runs in one layout by default
SLOW_ROWS = [
    (layout, *drafts)
    for layout, *drafts in DRAFT_ROWS
    if layout in SLOW or (drafts == [1, 1] and layout != "tp 2, ep 2, dp 2")
]
EXPERTS_PER_TOKEN = 3  #: of the tiny model
PROMPTS = {1: [5, 6, 7], 2: [9], 3: [4, 8, 15, 16, 23, 42, 7], 4: [11, 12], 5: [3, 1, 4, 1, 5]}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)


def config_of(
    folder: Path, parallel: list[dict[str, Any]], nextn: int, passes: bool = False, topk: int = 1
) -> Any:
    config: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 1024},
        "weights": {"use": "random"},
        "scheduler": {"overlap": False, "max_running_requests": 6, "chunk_size": 16},
        "graphs": {"use": "replaying", "batch_sizes": [1, 2, 4, 6]},
    }
    if passes:
        config["graphs"] |= {"prefill": True, "prefill_tokens": [4, 16, 24, 40]}
    if parallel:
        config["parallel"] = parallel
    if nextn:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": nextn, "topk": topk}
    return config


def tokens_of(
    config: dict[str, Any], plugins: PluginSet
) -> tuple[dict[int, list[int]], list[list[int]]]:
    """Return the tokens of all requests, and the batch sizes that each rank replayed."""
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        runners: list[Any] = [engine.runner.graphs for engine in ranks.engines]
        captured = [len(runner.filled) for runner in runners]
        heard = ranks.run([submit(id, prompt, 12) for id, prompt in PROMPTS.items()])
        found = {id: list(one.tokens) for id, one in heard.items()}
        replays = [
            [rows for _, rows in runner.filled[before:]]
            for runner, before in zip(runners, captured)
        ]
        ranks.check_idle()
    return found, replays


Alone = Callable[[int, int], dict[int, list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", num_hidden_layers=2, num_nextn_predict_layers=1
    )


@pytest.fixture(scope="module")
def alone(folder: Path, plugins: PluginSet) -> Alone:
    """Return a function from the steps of drafts and their branches to one rank's tokens."""
    return cache(lambda nextn, topk: tokens_of(config_of(folder, [], nextn, topk=topk), plugins)[0])


@pytest.mark.parametrize(
    ("layout", "nextn", "topk"),
    some_slow_rows(DRAFT_ROWS, SLOW_ROWS),
)
def test_ranks_replay_the_steps_of_one(
    layout: str, nextn: int, topk: int, folder: Path, alone: Alone, plugins: PluginSet
) -> None:
    found, replays = tokens_of(config_of(folder, LAYOUTS[layout], nextn, topk=topk), plugins)
    assert found == alone(nextn, topk)
    assert len(replays[0]) >= 5
    assert all(sizes == replays[0] for sizes in replays), "ranks replay graphs of the same sizes"


@pytest.mark.parametrize("nextn", [0, 2])
@pytest.mark.parametrize("layout", some_slow(LAYOUTS, SLOW))
def test_ranks_replay_passes_of_one_size(
    layout: str, nextn: int, folder: Path, alone: Alone, plugins: PluginSet
) -> None:
    """Groups with different tokens, or with none, replay the pass that fits the largest group."""
    config = config_of(folder, LAYOUTS[layout], nextn, passes=True)
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        runners: list[Any] = [engine.runner.graphs for engine in ranks.engines]
        for runner in runners:
            runner.passed.clear()
        heard = ranks.run([submit(id, prompt, 12) for id, prompt in PROMPTS.items()])
        loads = [engine.parallel.expert_load() for engine in ranks.engines]
        passed = [list(runner.passed) for runner in runners]
        ranks.check_idle()
    assert {id: list(one.tokens) for id, one in heard.items()} == alone(nextn, 1)
    sizes = [[size for _, size in found] for found in passed]
    assert sizes[0] and all(found == sizes[0] for found in sizes)
    if "dp" in layout:
        assert any(own != other for own, other in zip(passed[0], passed[-1])), "groups differ"
    if "ep" in layout and not nextn:
        # the last token of a request is not computed; padding chooses no expert
        computed = sum(len(prompt) + 11 for prompt in PROMPTS.values())
        for layer in loads[0]:
            assert sum(sum(load[layer]) for load in loads) == EXPERTS_PER_TOKEN * computed


@pytest.mark.parametrize("breaks", ["decode 4 forward", "pass 8"])
def test_a_rank_that_loses_a_peer_in_its_capture_is_not_the_cause(
    breaks: str, tmp_path: Path, plugins: PluginSet
) -> None:
    """RankSet raises the error of the lowest rank that has not only lost another."""
    config = config_of(write_config(tmp_path, "v3", num_hidden_layers=2), LAYOUTS["tp 2"], 0)
    config["graphs"] |= {"prefill": None, "prefill_tokens": [4, 8], "breaks": breaks}
    config["graphs"]["breaks_rank"] = 1
    with pytest.raises(CaptureError, match="made to fail"):
        RankSet(rank_plan(config, plugins), plugins)


@pytest.mark.parametrize(
    ("rank", "breaks", "graphs", "step"),
    [
        (1, "decode 4 forward", {}, r"a decode step of 4 rows could not be captured: RuntimeError"),
        (
            0,
            "pass 8",
            {"prefill": None, "prefill_tokens": [4, 8]},
            r"the prefill graph of 8 tokens could not be captured: RuntimeError",
        ),
    ],
)
def test_a_capture_that_fails_on_one_rank_ends_the_start_on_all(
    rank: int, breaks: str, graphs: dict[str, Any], step: str, tmp_path: Path
) -> None:
    """The ranks are processes. Alone, one rank would run prefill steps of this size eagerly."""
    before = rank_processes()
    config = config_of(write_config(tmp_path, "v3", num_hidden_layers=2), LAYOUTS["tp 2"], 0)
    config["graphs"] |= {**graphs, "breaks": breaks, "breaks_rank": rank}
    plugins = ["tests.plugins.replaying"]
    with pytest.raises(EngineDead, match=rf"^rank {rank} failed in phase capture: .*{step}"):
        LLM(**config, plugins=plugins, executor={"use": "multiprocess", "oversubscribe": True})
    assert rank_processes() <= before
