"""Steps with prompts in them, replayed from graphs around attention, give the tokens of eager ones,
at token counts on both sides of each captured one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from tests.support.tiny import VOCAB, write_config

pytestmark = pytest.mark.gpu
COUNTS = [8, 16, 32, 64]
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 31, 33, 40, 63, 64, 65, 90)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in_turn": {"scheduler": {"max_running_requests": 9, "overlap": False}},
    "chunks": {"scheduler": {"max_running_requests": 9, "chunk_size": 37}},
    "nextn": {"speculative": {"use": "nextn", "adaptive": False, "steps": 2}},
}
DRAFTING: dict[str, dict[str, Any]] = {
    "plain": CASES["nextn"],
    "no_cache": {**CASES["nextn"], "cache": {"use": "none"}},
    "chunks": {**CASES["nextn"], **CASES["chunks"]},
}


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cuda",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
        "scheduler": {"max_running_requests": 9},
        "graphs": {"use": "cuda_graph", "batch_sizes": [1, 2, 4, 8], "prefill_tokens": COUNTS},
    }
    return LLM(model=str(folder), **{**base, **config})


def folder_of(path: Path, name: str) -> Path:
    return write_config(path / name, name, num_nextn_predict_layers=int("v3" in name))


def graphs_of(llm: LLM) -> Any:
    executor: Any = llm._executor
    return executor._engine.runner.graphs


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def results(llm: LLM, seeds: tuple[int, ...] = (0, 1)) -> list[Any]:
    """Return the results of one prompt after another, then of all at once, so that prompts run
    beside decoding rows and after cached prefixes.
    """
    greedy = [
        SamplingParams(temperature=0.0, max_tokens=3 + i % 4, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]
    found = []
    for seed in seeds:
        lines = prompts(seed)
        alone = [
            llm.generate([line], params)[0] for line, params in zip(lines, greedy, strict=True)
        ]
        longer = [
            line + other[: 1 + len(other) // 2]
            for line, other in zip(lines, prompts(seed + 5), strict=True)
        ]
        found += [one.token_ids for done in (alone, llm.generate(longer, greedy)) for one in done]
    pages = llm.control("check")
    assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]
    return found


@pytest.mark.parametrize(
    ("name", "case"),
    [("v2", "plain"), ("v3", "plain"), ("v2", "chunks"), ("v3", "nextn"), ("v3", "in_turn")],
)
def test_replayed_prompts_give_the_eager_tokens(tmp_path: Path, name: str, case: str) -> None:
    folder, more = folder_of(tmp_path, name), CASES[case]
    with engine(folder, **more, graphs={"use": "eager"}) as llm:
        eager = results(llm)
    with engine(folder, **more) as llm:
        counts = [count for count in COUNTS if count <= llm.plan.sizes.max_step_tokens]
        assert graphs_of(llm)._passes.counts == counts
        assert results(llm) == eager
        assert results(llm) == eager, "replayed twice"


def test_what_a_longer_step_left_is_not_read(tmp_path: Path) -> None:
    """The memory that passes share holds NaN wherever the current step does not write."""
    folder = folder_of(tmp_path, "v3")
    with engine(folder, graphs={"use": "eager"}, cache={"use": "none"}) as llm:
        eager = results(llm, (3,))
    with engine(folder, cache={"use": "none"}) as llm:
        passes = graphs_of(llm)._passes._passes
        poison = [call.rows for made in passes.values() for call in made._calls] + [
            (made._hidden,) for made in passes.values()
        ]
        for _ in range(2):
            with torch.inference_mode():
                for part in [part for rows in poison for part in rows]:
                    part.fill_(float("nan"))
            torch.cuda.synchronize()
            assert results(llm, (3,)) == eager


def test_prompt_logprobs(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    found = []
    for graphs in (
        {"use": "eager"},
        {"use": "cuda_graph", "batch_sizes": [1, 4], "prefill_tokens": COUNTS},
    ):
        with engine(folder_of(tmp_path, "v2"), graphs=graphs) as llm:
            found.append(
                [
                    value
                    for done in llm.generate(prompts(4), params)
                    if done.prompt_logprobs is not None
                    for value in done.prompt_logprobs.token
                ]
            )
    assert len(found[0]) == len(found[1]) == sum(LENGTHS) - len(LENGTHS)
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() < 1e-3


def test_replays_take_no_memory(tmp_path: Path) -> None:
    with engine(folder_of(tmp_path, "v2"), cache={"use": "none"}) as llm:
        results(llm)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        results(llm)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_block_fp8(tmp_path: Path) -> None:
    """Rounding depends on the number of tokens here, so only first tokens of one prompt are
    compared.
    """
    folder, found = folder_of(tmp_path, "v3_fp8"), []
    for graphs in (
        {"use": "eager"},
        {"use": "cuda_graph", "batch_sizes": [1, 4], "prefill_tokens": COUNTS},
    ):
        with engine(folder, dtype="bfloat16", graphs=graphs) as llm:
            found.append(
                llm.generate([prompts(0)[4]], SamplingParams(temperature=0.0, max_tokens=2))[
                    0
                ].token_ids
            )
            assert all(
                one.token_ids for one in llm.generate(prompts(1), SamplingParams(max_tokens=4))
            )
    assert found[0] == found[1]


def draft_cache(llm: LLM) -> torch.Tensor:
    """Return the cache of the layer after the model's own layers, without the scratch page."""
    executor: Any = llm._executor
    torch.cuda.synchronize()
    found: torch.Tensor = executor._engine.runner.attention._kv[-1][
        llm.plan.sizes.page_size :
    ].clone()
    return found


@pytest.mark.parametrize("case", DRAFTING)
def test_the_drafts_passes_over_prompts_cache_what_eager_ones_do(tmp_path: Path, case: str) -> None:
    """Drafts change no token, so the draft's cache itself is compared; rounding may differ, because
    GEMMs have more rows.
    """
    folder, found = folder_of(tmp_path, "v3"), []
    for replayed in (False, True):
        with engine(folder, **DRAFTING[case]) as llm:
            executor: Any = llm._executor
            draft_extend = executor._engine.runner.draft_extend
            assert draft_extend.replacement.counts == list(llm.plan.sizes.extend_tokens) != []
            if not replayed:
                draft_extend.replacement = None
            found.append((results(llm), draft_cache(llm)))
            stats = llm.stats
            found[-1] += ((stats.drafted_tokens, stats.accepted_tokens),)
    eager, own = found
    assert eager[0] == own[0] and eager[2] == own[2]
    assert own[1].any() and (own[1] - eager[1]).abs().max() < 1e-3 * eager[1].abs().max()


def test_without_padding_the_draft_caches_the_same_to_the_bit(tmp_path: Path) -> None:
    folder, found = folder_of(tmp_path, "v3"), []
    for replayed in (False, True):
        with engine(folder, **DRAFTING["no_cache"]) as llm:
            executor: Any = llm._executor
            if not replayed:
                executor._engine.runner.draft_extend.replacement = None
            for count in llm.plan.sizes.extend_tokens:
                line = np.random.default_rng(count).integers(2, VOCAB, count + 1).tolist()
                llm.generate([line], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
                found.append(draft_cache(llm))
    half = len(found) // 2
    assert all(
        one.any() and torch.equal(one, other)
        for one, other in zip(found[:half], found[half:], strict=True)
    )


def test_the_drafts_pass_leaves_nothing_of_the_targets_to_read(tmp_path: Path) -> None:
    """Prompts are scored from states that the pass may overwrite."""
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    found = []
    for graphs in (
        {"use": "eager"},
        {"use": "cuda_graph", "batch_sizes": [1, 4], "prefill_tokens": COUNTS},
    ):
        with engine(folder_of(tmp_path, "v3"), graphs=graphs, **CASES["nextn"]) as llm:
            found.append(
                [
                    value
                    for done in llm.generate(prompts(4), params)
                    if done.prompt_logprobs is not None
                    for value in done.prompt_logprobs.token
                ]
            )
    assert len(found[0]) == len(found[1]) == sum(LENGTHS) - len(LENGTHS)
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() < 1e-3


def test_replays_with_drafts_take_no_memory(tmp_path: Path) -> None:
    with engine(folder_of(tmp_path, "v3"), **DRAFTING["no_cache"]) as llm:
        results(llm)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        results(llm)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
