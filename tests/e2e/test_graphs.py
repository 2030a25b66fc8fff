"""Steps replayed from graphs give the tokens that eager ones give, whatever fills a graph up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import CaptureError
from glowplug.core.plugin.draft_shape import NO_DRAFTS
from glowplug.entrypoints.front.llm import Completion
from tests.plugins import replaying_runtime, short_rows, short_rows_runtime
from tests.support.tiny import VOCAB, write_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.0, min_tokens=6, logit_bias={5: 2.0}, max_tokens=13),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", num_nextn_predict_layers=1, num_hidden_layers=2
    )


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 2048},
        "scheduler": {"max_running_requests": 7},
        "graphs": {"use": "replaying", "batch_sizes": [1, 2, 4, 6]},
    }
    return LLM(
        model=str(folder),
        plugins=["tests.plugins.replaying", "tests.plugins.short_rows"],
        **{**base, **config},
    )


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(2, VOCAB, 1 + 5 * i % 23).tolist() for i in range(count)]


def tokens(found: list[Completion]) -> list[tuple[list[int], str | None]]:
    return [(one.token_ids, one.finish_reason) for one in found]


def generate(
    folder: Path, count: int, params: Any, **config: Any
) -> list[tuple[list[int], str | None]]:
    with engine(folder, **config) as llm:
        found = llm.generate(prompts(count), params)
        pages = llm.control("check")
        assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]
    return tokens(found)


NEXTN = {"speculative": {"use": "nextn", "adaptive": False, "steps": 2}}
TREES = {"speculative": {**NEXTN["speculative"], "steps": 3, "topk": 3, "draft_tokens": 8}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention": {"page_size": 1}},
        {"cache": {"use": "none"}},
        NEXTN,
        {**NEXTN, "attention": {"page_size": 4}},
        TREES,
        {**TREES, "attention": {"page_size": 4}},
    ],
    ids=["plain", "page_1", "no_cache", "nextn", "nextn_page_4", "trees", "trees_page_4"],
)
def test_replayed_steps_give_the_eager_tokens(folder: Path, more: dict[str, Any]) -> None:
    for count in (1, 3, 7):
        params = [
            SamplingParams(temperature=0.0, max_tokens=5 + 3 * i, ignore_eos=True)
            for i in range(count)
        ]
        eager = generate(folder, count, params, **more, graphs={"use": "eager"})
        assert generate(folder, count, params, **more) == eager
        filled = replaying_runtime.NEWEST[0].filled
        assert filled and all(live <= rows and rows in (1, 2, 4, 6) for live, rows in filled)
        assert max(live for live, _ in filled) == min(count, 6), (
            "more rows than the largest graph holds run eagerly"
        )


@pytest.mark.parametrize("more", [{}, NEXTN, TREES], ids=["plain", "nextn", "trees"])
def test_every_way_of_sampling(folder: Path, more: dict[str, Any]) -> None:
    """Requests join, leave and change the batch's shape; some of their steps sample outside the
    graphs.
    """
    params = [MIXED[i % len(MIXED)] for i in range(12)]
    eager = generate(folder, 12, params, **more, graphs={"use": "eager"})
    assert generate(folder, 12, params, **more) == eager


def test_a_step_is_replayed_in_few_pieces(folder: Path) -> None:
    with engine(folder, graphs={"use": "replaying", "max_batch": 3}) as llm:
        runner = replaying_runtime.NEWEST[0]
        assert {
            rows: graph.pieces
            for graphs in runner._decode_graphs.values()
            for rows, graph in graphs.items()
        } == dict.fromkeys((3, 2, 1), ("forward", "accept greedy", "accept random"))
        begun, steps = runner.functions.replays, len(runner.filled)
        llm.generate(prompts(2), GREEDY)
        assert runner.functions.replays - begun == 2 * (len(runner.filled) - steps)
        info = llm.control("info")
        assert "capture" in info["startup_seconds"] and info["compile_seconds"] >= 0


def test_a_failed_capture_names_its_place(folder: Path) -> None:
    graphs = {"use": "replaying", "batch_sizes": [2, 4], "breaks": "decode 2 forward"}
    with pytest.raises(
        CaptureError,
        match="a decode step of 2 rows could not be captured: RuntimeError in its piece 'forward'",
    ):
        engine(folder, graphs=graphs)
    with engine(folder, graphs={**graphs, "on_failure": "eager"}) as llm:
        runner = replaying_runtime.NEWEST[0]
        assert list(runner._decode_graphs[NO_DRAFTS]) == [4]  # type: ignore[index]
        llm.generate(prompts(2), GREEDY)
        assert {rows for _, rows in runner.filled} == {4}


def test_short_rows_have_slots_of_their_own(folder: Path) -> None:
    """Such slots serve rows up to the attention's short context and no longer, only the batch sizes
    it names, and no drafts.
    """
    short: dict[str, Any] = {"attention": {"use": "short_mla", "page_size": 4}}
    lengths = [(count, [3 + i for i in range(count)]) for count in (1, 3, 4, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for count, sizes in lengths:
        given = [np.random.default_rng(n).integers(2, VOCAB, n).tolist() for n in sizes]
        with engine(folder, graphs={"use": "eager"}) as llm:
            wanted = tokens(llm.generate(given, params))
        short_rows_runtime.PLANNED.clear()
        with engine(folder, **short) as llm:
            assert llm.plan.sizes.short_keys == short_rows.KEYS and llm.plan.sizes.short_rows == (
                2,
                4,
            )
            begun = len(short_rows_runtime.PLANNED)
            assert tokens(llm.generate(given, params)) == wanted
        served = short_rows_runtime.PLANNED[begun:]
        assert served
        for rows, longest, told in served:
            fits = rows in (2, 4) and longest <= short_rows.KEYS
            assert told == (short_rows.KEYS if fits else llm.plan.sizes.positions), (
                rows,
                longest,
                told,
            )
        if count in (3, 4):
            assert {longest for _, longest, told in served if told == short_rows.KEYS} >= {
                short_rows.KEYS
            }
            assert {longest for _, longest, told in served if told != short_rows.KEYS} >= {
                short_rows.KEYS + 1
            }
    for more in (NEXTN, {"context_length": short_rows.KEYS - 1}):
        with engine(folder, **short, **more) as llm:
            assert llm.plan.sizes.short_rows == ()
            llm.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=4))
