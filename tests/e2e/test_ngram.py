"""N-gram drafts change only the speed of tokens, and do not depend on batches, caches, graphs or
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.entrypoints.front.llm import Completion
from glowplug.models.embedded.tasks import held_out_tasks
from tests.e2e.cuts import CUTS
from tests.plugins import accepting, replaying_runtime
from tests.support.combinations import Combination
from tests.support.draft_requests import follows_distribution
from tests.support.tiny import write_config

VOCAB = 12  #: so few that an answer often continues like an earlier part of the text
CHAIN: dict[str, Any] = {"use": "ngram", "adaptive": False, "steps": 3}
TREE: dict[str, Any] = {"use": "ngram", "adaptive": False, "steps": 3, "topk": 3, "draft_tokens": 8}
SHAPES = {"chain": CHAIN, "tree": TREE}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_tokens=14, seed=3, ignore_eos=True, **changes)
    for changes in (
        {"temperature": 1.2, "top_k": 4},
        {"temperature": 0.8, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.7},
        {"top_p": 0.7, "min_p": 0.05},
    )
]


@pytest.fixture(scope="module", params=["v3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp(request.param), request.param, vocab_size=VOCAB)


def engine(folder: Path, speculative: dict[str, Any] | None, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
    }
    if speculative is not None:
        base["speculative"] = speculative
    return LLM(
        model=str(folder),
        plugins=["tests.plugins.accepting", "tests.plugins.replaying"],
        **{**base, **config},
    )


def prompts() -> list[list[int]]:
    """Return prompts of uneven lengths, which begin alike and repeat themselves."""
    rng = np.random.default_rng(4)
    shared = rng.integers(2, VOCAB, 20).tolist()
    return [
        (shared * 3)[: n // 2] + rng.integers(2, VOCAB, n - n // 2).tolist()
        for n in (1, 2, 16, 17, 33, 48, 64, 90)
    ]


def same(got: list[Completion], want: list[Completion]) -> None:
    assert [(one.token_ids, one.finish_reason) for one in got] == [
        (one.token_ids, one.finish_reason) for one in want
    ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with engine(folder, None) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy(plain: LLM) -> list[Completion]:
    return plain.generate(prompts(), GREEDY)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", ["batched", "no_overlap", "chunked", "page_1"])
def test_tokens_are_those_without_drafts(
    folder: Path, plain: LLM, greedy: list[Completion], variant: str, shape: str
) -> None:
    with engine(folder, SHAPES[shape], **CUTS[variant]) as llm:
        same(llm.generate(prompts(), GREEDY), greedy)
        same(llm.generate(prompts()[::-1], GREEDY)[::-1], greedy)  # with a warm cache
        several = [prompts()[i % 8] for i in range(4)], SAMPLED
        same(llm.generate(*several), plain.generate(*several))
        stats = llm.stats
        pages = llm.control("check")
        assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_preempted_and_repeated_choices_go_on_where_they_were(
    folder: Path, plain: LLM, shape: str
) -> None:
    params = GREEDY.replace(n=2, temperature=0.9, seed=8, max_tokens=60)
    want = plain.generate(prompts(), params)
    with engine(folder, SHAPES[shape], context_length=160, memory={"kv_tokens": 400}) as llm:
        got = llm.generate(prompts(), params)
        assert llm.stats.preemptions > 0
    assert [[c.token_ids for c in one.choices] for one in got] == [
        [c.token_ids for c in one.choices] for one in want
    ]


VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "no_overlap": {"scheduler": {"overlap": False}},
    "chunked": {"scheduler": {"chunk_size": 7}},
    "unmixed": {"scheduler": {"mixed": False, "chunk_size": 16}},
    "replayed": {"graphs": {"use": "replaying", "batch_sizes": [8]}},
    "replayed, padded": {"graphs": {"use": "replaying", "batch_sizes": [3, 6, 16]}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_gains_the_same_in_any_company(folder: Path, shape: str) -> None:
    """Each request gains the same tokens in each step: alone and in batches, eager and replayed,
    with a cold and a warm cache.
    """
    accepting.take()
    with engine(folder, SHAPES[shape], cache={"use": "none"}) as llm:
        for ids in prompts():
            llm.generate([ids], GREEDY)
    alone = accepting.take()
    assert any(count > 1 for row in alone for count in row)
    for name, variant in VARIANTS.items():
        with engine(folder, SHAPES[shape], **variant) as llm:
            llm.generate(prompts(), GREEDY)
            assert accepting.take() == alone, name
            warm = llm.generate(prompts(), GREEDY)
            assert sum(one.cached_tokens for one in warm) > 0
            assert accepting.take() == alone, f"{name}, with a warm cache"
            if "replayed" in name:
                runner = replaying_runtime.NEWEST[0]
                assert runner.functions.replays > runner.captured


REPLAYED = {"graphs": {"use": "replaying", "batch_sizes": [4, 8]}}
#: layout and further sections; the stand-in for graphs takes no overlapped steps
LAYOUTS: dict[str, tuple[Combination, dict[str, Any]]] = {
    "tp2": (Combination(tp=2), {}),
    "dp2": (Combination(tp=2, dp=2), {}),
    "dp2 in turn": (Combination(tp=2, dp=2, overlap=False), {}),
    "tp2 replayed": (Combination(tp=2, overlap=False), REPLAYED),
    "dp2 replayed": (Combination(tp=2, dp=2, overlap=False), REPLAYED),
}


Gains = list[tuple[list[int], list[int]]]  #: tokens of each request, and their number in each step


def rank_gains(folder: Path, shape: str, one: Combination, **sections: Any) -> Gains:
    """Return the gains of all prompts on the ranks of a combination."""
    plugins = load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)
    config = one.config(folder, memory={"kv_tokens": 2048}, weights={"use": "random"})
    config |= {"speculative": SHAPES[shape], "context_length": 160, **sections}
    asked = [submit(i, ids, 8 + 2 * i) for i, ids in enumerate(prompts())]
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        ranks.run(asked)
        ranks.check_idle()
        return [(ranks.collected[i].tokens, ranks.collected[i].counts) for i in range(len(asked))]


@pytest.fixture(scope="module")
def gains_of_one(folder: Path) -> Callable[[str], Gains]:
    """Return a function from the drafts' shape to the gains of one rank."""
    return cache(lambda shape: rank_gains(folder, shape, Combination()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_gain_what_one_rank_gains(
    folder: Path, gains_of_one: Callable[[str], Gains], name: str, shape: str
) -> None:
    layout, more = LAYOUTS[name]
    if layout.dp and "llama" in folder.name:
        pytest.skip("groups of ranks are for latent attention")
    assert rank_gains(folder, shape, layout, **more) == gains_of_one(shape)


COPIES = [task for task in held_out_tasks(400) if task.kind == "copy"][:16]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_embedded_model_accepts_drafts_when_it_copies(shape: str) -> None:
    """On held-out copy tasks the answers are those without drafts, and rows gain at least 1.8
    tokens per step.
    """
    chats = [[{"role": "user", "content": task.prompt}] for task in COPIES]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM("embedded", dtype="float32", device="cpu") as llm:
        want = llm.chat(chats, params)
    with LLM("embedded", dtype="float32", device="cpu", speculative=SHAPES[shape]) as llm:
        got = llm.chat(chats, params)
        stats, width = llm.stats, llm.plan.sizes.width
    same(got, want)
    length = 1 + stats.accepted_tokens / (stats.drafted_tokens / (width - 1))
    print(f"{shape}: accept length {length:.2f}")
    assert length >= 1.8


@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_tokens_follow_the_targets_distribution(folder: Path, shape: str) -> None:
    with engine(folder, SHAPES[shape]) as llm, engine(folder, None) as plain:
        follows_distribution(llm, plain, 400)


def test_a_vocabulary_below_the_most_log_probabilities_has_all_of_them(folder: Path) -> None:
    wanted = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, prompt_logprobs=20)
    with engine(folder, CHAIN) as llm:
        (done,) = llm.generate([[1, 2, 3, 4]], wanted)
    assert done.prompt_logprobs is not None
    assert np.asarray(done.prompt_logprobs.top_ids).shape == (3, VOCAB)
