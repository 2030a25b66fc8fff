"""Steps replayed from CUDA graphs give the tokens of eager ones, at batch sizes on both sides of
each captured one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.engine.runner import Runner
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.step.batch import Batch
from glowplug.plugins.graphs.capture.decode_graph import DecodeGraph
from tests.support.tiny import VOCAB, write_config

pytestmark = pytest.mark.gpu
SIZES = [1, 2, 4, 8]


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cuda",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
        "scheduler": {"max_running_requests": 9},
        "graphs": {"use": "cuda_graph", "batch_sizes": SIZES, "max_prefill_tokens": 64},
    }
    return LLM(model=str(folder), **{**base, **config})


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(2, VOCAB, 1 + 17 * i % 70).tolist() for i in range(count)]


def lengths(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=8 + 3 * i, ignore_eos=True) for i in range(count)
    ]


def runner_of(llm: LLM) -> Any:
    executor: Any = llm._executor
    return executor._engine.runner


def tokens(llm: LLM, count: int, params: Any = None) -> list[list[int]]:
    found = [one.token_ids for one in llm.generate(prompts(count), params or lengths(count))]
    pages = llm.control("check")
    assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]
    return found


def folder_of(path: Path, name: str) -> Path:
    return write_config(path / name, name, num_nextn_predict_layers=int("v3" in name))


@pytest.mark.parametrize("name", ["v2", "v3"])
@pytest.mark.parametrize(
    "more",
    [{}, {"scheduler": {"max_running_requests": 9, "overlap": False}}],
    ids=["overlap", "in_turn"],
)
def test_graphs_give_the_eager_tokens(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, name)
    counts = (1, 2, 3, 4, 5, 8, 9)
    with engine(folder, **more, graphs={"use": "eager"}) as llm:
        eager = [tokens(llm, count) for count in counts]
    with engine(folder, **more) as llm:
        assert [tokens(llm, count) for count in counts] == eager
        assert sorted(runner_of(llm).graphs._decode_graphs[NO_DRAFTS]) == SIZES


@pytest.mark.parametrize("steps", [1, 3])
def test_verification_and_drafts_are_replayed(tmp_path: Path, steps: int) -> None:
    folder = folder_of(tmp_path, "v3")
    with engine(folder, graphs={"use": "eager"}) as llm:
        plain = [tokens(llm, count) for count in (1, 3, 9)]
    for overlap in (True, False):
        with engine(
            folder,
            speculative={"use": "nextn", "adaptive": False, "steps": steps},
            scheduler={"max_running_requests": 9, "overlap": overlap},
        ) as llm:
            assert [tokens(llm, count) for count in (1, 3, 9)] == plain
            captured = runner_of(llm).graphs._decode_graphs[DraftShape.chain(steps)]
            pieces = next(iter(captured.values())).pieces
            assert pieces[:3] == ("drafts", "forward", "accept greedy")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_with_drafts_is_launched_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """It is three replays, and no call of the launch waits for the device."""
    replays: list[str] = []
    steps: list[list[str]] = []
    run, launch = DecodeGraph.run, Runner.launch

    def counted(graph: DecodeGraph, name: str, work: Any) -> Any:
        replays.append(name)
        return run(graph, name, work)

    def checked(runner: Runner, batch: Batch) -> Any:
        if batch.num_decodes < batch.num_rows or runner.graphs.graph_for(batch) is None:
            return launch(runner, batch)
        begun = len(replays)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(runner, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            steps.append(replays[begun:])

    with engine(
        folder_of(tmp_path, "v3"),
        speculative={"use": "nextn", "adaptive": False, "steps": 3},
        scheduler={"max_running_requests": 8, "overlap": overlap},
    ) as llm:
        monkeypatch.setattr(DecodeGraph, "run", counted)
        monkeypatch.setattr(Runner, "launch", checked)
        tokens(llm, 4)
    assert len(steps) > 4
    assert all(step == ["drafts", "forward", "accept greedy"] for step in steps)


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 5},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.01},
    {"logprobs": 3, "top_p": 0.9},
    {
        "frequency_penalty": 0.6,
        "logit_bias": {5: 4.0},
        "allowed_token_ids": list(range(0, VOCAB, 2)),
    },
    {"logprobs": 1, "presence_penalty": 0.5},
]


@pytest.mark.parametrize(
    "speculative",
    [{"use": "none"}, {"use": "nextn", "adaptive": False, "steps": 2}],
    ids=["plain", "nextn"],
)
def test_every_way_of_sampling(tmp_path: Path, speculative: dict[str, Any]) -> None:
    params = [
        SamplingParams(
            **{
                "temperature": 1.0,
                "seed": 6,
                "max_tokens": 9 + 3 * i % 10,
                "ignore_eos": True,
                **way,
            }
        )
        for i, way in enumerate(WAYS)
    ]
    folder, found = folder_of(tmp_path, "v3"), []
    for graphs in (
        {"use": "eager"},
        {"use": "cuda_graph", "batch_sizes": SIZES, "max_prefill_tokens": 64},
    ):
        with engine(folder, speculative=speculative, graphs=graphs) as llm:
            outputs = [llm.generate(prompts(1), [one])[0] for one in params]
            outputs += llm.generate(prompts(5), params[:5]) + llm.generate(prompts(4), params[5:])
            found.append([one.token_ids for one in outputs])
            if graphs["use"] == "cuda_graph":
                (captured,) = runner_of(llm).graphs._decode_graphs.values()
                words = {
                    name.removeprefix("accept ")
                    for name in captured[4].pieces
                    if name.startswith("accept ")
                }
                assert words == {"greedy", "random", "top-p", "cut", "edited", "scored"}
    assert found[0] == found[1]


def test_replays_take_no_memory(tmp_path: Path) -> None:
    long = [SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)] * 5
    with engine(folder_of(tmp_path, "v2")) as llm:
        tokens(llm, 5, long)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        tokens(llm, 5, long)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_block_fp8_is_captured(tmp_path: Path) -> None:
    """Rounding depends on the batch's shape here, so only the first tokens of one row are
    compared.
    """
    folder = folder_of(tmp_path, "v3_fp8")
    found = []
    for graphs in (
        {"use": "eager"},
        {"use": "cuda_graph", "batch_sizes": [1, 4], "max_prefill_tokens": 64},
    ):
        with engine(folder, dtype="bfloat16", graphs=graphs) as llm:
            found.append(tokens(llm, 1)[0][:2])
            assert [len(ids) for ids in tokens(llm, 3)] == [8, 11, 14]
    assert found[0] == found[1]


def test_dequantised_block_fp8_is_captured_in_float32(tmp_path: Path) -> None:
    folder, found = folder_of(tmp_path, "v3_fp8"), []
    for graphs in ({"use": "eager"}, {"use": "cuda_graph", "batch_sizes": [1, 4]}):
        with engine(
            folder, quantization={"use": "block_fp8", "activations": "none"}, graphs=graphs
        ) as llm:
            found.append([tokens(llm, count) for count in (1, 3)])
    assert found[0] == found[1]


def test_auto_captures_and_says_what_it_took(tmp_path: Path) -> None:
    with engine(folder_of(tmp_path, "v3"), graphs={}) as llm:
        assert llm.plan.choice("graphs").name == "cuda_graph"
        assert llm.control("info")["startup_seconds"]["capture"] > 0
