"""Steps with prompts in them, replayed in pieces around attention, give the tokens of eager
steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.errors import CaptureError
from glowplug.core.step.messages import Logprobs
from tests.plugins import replaying_runtime
from tests.plugins.projected_mla_runtime import CountedMla
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import VOCAB, write_config

COUNTS = [4, 8, 16, 32]
LENGTHS = (
    1,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    23,
    31,
    32,
    33,
    47,
)  #: both sides of every count, odd ones, beyond the last
BASE: dict[str, Any] = {
    "weights": {"use": "random"},
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 128,
    "memory": {"kv_tokens": 2048},
    "scheduler": {"max_running_requests": 7},
}
NEXTN = {"speculative": {"use": "nextn", "adaptive": False, "steps": 2}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_cache": {"cache": {"use": "none"}},
    "chunks": {"scheduler": {"max_running_requests": 7, "chunk_size": 11}},
    "page_1": {"attention": {"page_size": 1}},
    "nextn": NEXTN,
    "in_turn": {"scheduler": {"max_running_requests": 7, "overlap": False}},
}


MODELS = ("v3", "v2", "llama")
#: (model, case); with each model prompts are replayed plainly and in chunks
SLOW = [
    *(("v2", case) for case in ("no_cache", "page_1", "in_turn")),
    *(("llama", case) for case in ("no_cache", "page_1")),
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    more = {"num_nextn_predict_layers": 1} if name == "v3" else {}
    return write_config(tmp_path_factory.mktemp(name), name, num_hidden_layers=2, **more)


def engine(folder: Path, graphs: dict[str, Any] | None = None, **config: Any) -> LLM:
    graphs = {
        "use": "replaying",
        "batch_sizes": [1, 2, 4],
        "prefill": True,
        "prefill_tokens": COUNTS,
        **(graphs or {}),
    }
    return LLM(
        model=str(folder),
        plugins=["tests.plugins.replaying", "tests.plugins.projected_mla"],
        **{**BASE, **config, "graphs": graphs},
    )


def eager(folder: Path, **config: Any) -> LLM:
    return LLM(
        model=str(folder),
        plugins=["tests.plugins.projected_mla"],
        **{**BASE, **config, "graphs": {"use": "eager"}},
    )


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def results(llm: LLM) -> list[Any]:
    """Return the results of one prompt after another, then of all at once, so that prompts run
    beside decoding rows; then of all again, after cached prefixes.
    """
    greedy = [
        SamplingParams(temperature=0.0, max_tokens=2 + i % 3, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]
    found = []
    for seed in (0, 0):
        lines = prompts(seed)
        alone = [
            llm.generate([line], params)[0] for line, params in zip(lines, greedy, strict=True)
        ]
        longer = [
            line + other[: 1 + len(other) // 2]
            for line, other in zip(lines, prompts(seed + 5), strict=True)
        ]
        for done in (alone, llm.generate(longer, greedy)):
            found += [(one.token_ids, one.finish_reason) for one in done]
    pages = llm.control("check")
    assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]
    return found


@pytest.mark.parametrize(
    ("folder", "case"),
    some_slow_rows([("v3", case) for case in ("plain", "chunks", "nextn")], [("v3", "chunks")]),
    indirect=["folder"],
)
def test_steps_prepared_in_pieces_give_the_eager_tokens(folder: Path, case: str) -> None:
    """Norm, RoPE, the store in the cache and the expansion of keys are replayed with padding."""
    backend = {"attention": {"use": "projected_mla"}, "ops": {"use": "rows"}}
    config = {**CASES[case], **backend}
    before = CountedMla.prepared
    with eager(folder, **config) as llm:
        want = results(llm)
    assert CountedMla.prepared == before
    with engine(folder, **config) as llm:
        assert results(llm) == want
    assert CountedMla.prepared > before


@pytest.mark.parametrize(
    ("folder", "case"),
    some_slow_rows(
        # the others have no layer to draft with
        [(model, case) for case in CASES for model in MODELS if case != "nextn" or model == "v3"],
        SLOW,
    ),
    indirect=["folder"],
)
def test_replayed_prompts_give_the_eager_tokens(folder: Path, case: str) -> None:
    with eager(folder, **CASES[case]) as llm:
        want = results(llm)
    with engine(folder, **CASES[case]) as llm:
        assert results(llm) == want
        passed = replaying_runtime.NEWEST[0].passed
    assert {count for _, count in passed} == set(
        COUNTS[:3] if case == "chunks" else COUNTS
    )  # 11 + 7 tokens at most
    assert all(count == min(c for c in COUNTS if c >= tokens) for tokens, count in passed)
    assert {tokens for tokens, _ in passed} >= {tokens for tokens in LENGTHS if tokens <= 11}


def test_prompt_logprobs_are_the_eager_ones(folder: Path) -> None:
    """NOTE: a grouped GEMM may sum a row in another order if padding adds rows to its group."""
    params = SamplingParams(
        temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    found: list[list[Logprobs]] = []
    for make in (eager, engine):
        with make(folder) as llm:
            done = llm.generate(prompts(3), params)
        found.append([part for one in done for part in (one.logprobs, one.prompt_logprobs) if part])
    assert len(found[0]) == 2 * len(LENGTHS) - LENGTHS.count(1)
    for wanted, replayed in zip(*found, strict=True):
        assert replayed.top_ids == wanted.top_ids
        assert replayed.token == pytest.approx(wanted.token, abs=1e-6)
        for some, others in zip(wanted.top, replayed.top, strict=True):
            assert others == pytest.approx(some, abs=1e-6)


def test_padding_rows_stay_zero(folder: Path) -> None:
    """Values that a longer step left, even of a failed sequence, are cleared from the rows that pad
    a shorter one.
    """
    with engine(folder) as llm:
        runner = replaying_runtime.NEWEST[0]
        memory = next(iter(runner._passes._passes.values()))._memory
        llm.generate([prompts(0)[12]], SamplingParams(max_tokens=1))
        assert memory._live == 32 and all(
            result[:32].any(1).all() for result in memory._results.values()
        )
        with torch.inference_mode():
            for result in memory._results.values():
                result[:32] = float("nan")
        llm.generate([prompts(0)[3]], SamplingParams(max_tokens=1))
        assert memory._live == 5
        for result in memory._results.values():
            assert not result[5:].any() and result[:5].isfinite().all()
        assert not memory.ids[5:].any() and not memory.positions[5:].any()


def test_a_pass_is_one_piece_a_layer_and_one(folder: Path) -> None:
    with engine(folder) as llm:
        runner = replaying_runtime.NEWEST[0]
        assert runner._passes.counts == COUNTS
        assert {
            (made.split_points, len(made._pieces)) for made in runner._passes._passes.values()
        } == {(2, 3)}
        begun = runner.threads.replays
        llm.generate([prompts(0)[5]], SamplingParams(max_tokens=1))
        assert runner.threads.replays - begun == 3
        assert [tokens for tokens, _ in runner.passed][-1] == 8


@pytest.mark.parametrize(
    "more", [{"on_failure": "eager"}, {"prefill": None}], ids=["as told", "not asked for"]
)
def test_a_failed_capture_of_a_pass_is_reported(
    folder: Path, more: dict[str, Any], caplog: Any
) -> None:
    with pytest.raises(
        CaptureError,
        match="the prefill graph of 8 tokens could not be captured: "
        "RuntimeError after split point 0",
    ):
        engine(folder, {"breaks": "pass 8"})
    with engine(folder, {"breaks": "pass 8", **more}) as llm:
        runner = replaying_runtime.NEWEST[0]
        assert runner._passes.counts == [4, 16, 32]
        assert "the prefill graph of 8 tokens could not be captured" in caplog.text
        llm.generate([prompts(0)[4]], SamplingParams(max_tokens=1))
        assert runner.passed[-1] == (7, 16)


def test_prefill_graphs_can_be_left_out(folder: Path) -> None:
    with engine(folder, {"prefill": False, "prefill_tokens": None}) as llm:
        assert llm.plan.sizes.pass_tokens == ()
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        assert replaying_runtime.NEWEST[0].passed == []
