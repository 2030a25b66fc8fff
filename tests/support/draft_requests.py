"""Requests whose answers must be the same with drafts and without, and a tiny model to run them on.

``tests/e2e/conftest.py`` has the fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.testing.suites.sampler import assert_follows
from glowplug.entrypoints.front.llm import Completion
from tests.support.tiny import write_config

VOCAB = 12  #: so few that a random draft is sometimes right
#: enough tokens to begin a page, whatever the prompt; each further one is a step of every engine
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=2)


#: scheduler of engines that run very many short requests
MANY_ROWS = {"max_running_requests": 64}


BASE: dict[str, Any] = {
    "weights": {"use": "random"},
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 256,
    "memory": {"kv_tokens": 4096},
}


def engine(folder: Path, steps: int, **config: Any) -> LLM:
    base = dict(BASE)
    if steps:
        base["speculative"] = {"use": "nextn", "adaptive": False, "steps": steps}
    return LLM(model=str(folder), plugins=["tests.plugins.accepting"], **{**base, **config})


def prompts() -> list[list[int]]:
    """Return prompts of uneven lengths around page and chunk borders, with shared prefixes."""
    rng = np.random.default_rng(11)
    shared = rng.integers(2, VOCAB, 40).tolist()
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 90]
    return [(shared[: min(40, n // 2)] + rng.integers(2, VOCAB, n).tolist())[:n] for n in lengths]


def around_pages(some: list[list[int]]) -> list[list[int]]:
    """Return the prompts that are shorter than a page, fill it, and are one token longer than one
    page and two.
    """
    return [ids for ids in some if len(ids) in (2, 16, 17, 33)]


def features() -> list[SamplingParams]:
    """Return one request for each sampling feature, as many as there are prompts."""

    def make(**changes: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **changes})

    return [
        make(temperature=0.0, logprobs=3),
        make(),
        make(temperature=1.4, top_k=3),
        make(top_p=0.6, logprobs=0),
        make(min_p=0.1),
        make(temperature=0.0, repetition_penalty=1.3),
        make(presence_penalty=1.5, logprobs=2),
        make(temperature=0.0, frequency_penalty=0.7),
        make(logit_bias={7: 3.0, 8: -100.0}),
        make(allowed_token_ids=[2, 3, 5, 7], top_k=2),
        make(min_tokens=9, stop_token_ids=[3, 5], ignore_eos=False),
        make(
            temperature=0.0,
            prompt_logprobs=2,
            frequency_penalty=0.3,
            presence_penalty=0.3,
            min_tokens=5,
            ignore_eos=False,
        ),
    ]


def all_pages_are_back(llm: LLM) -> None:
    pages = llm.control("check")
    assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]


def same(got: list[Completion], want: list[Completion]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (
            b.token_ids,
            b.finish_reason,
            b.stop_reason,
        ), i
        for ours, theirs in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                np.testing.assert_allclose(ours.token, theirs.token, atol=1e-4)
                np.testing.assert_allclose(ours.top, theirs.top, atol=1e-4)


def limits_are_exact(llm: LLM, plain: LLM) -> None:
    """Check that requests end at the same token with drafts as without.

    Args:
        llm: an engine that drafts.
        plain: the engine without drafts.
    """
    short = prompts()[2:6]
    cases = [GREEDY.replace(max_tokens=count) for count in range(1, 10)]
    cases += [
        GREEDY.replace(max_tokens=None, temperature=1.0, seed=seed, ignore_eos=False)
        for seed in range(6)
    ]
    cases += [
        GREEDY.replace(max_tokens=60, stop_token_ids=[2, 3], min_tokens=count)
        for count in (0, 4, 7)
    ]
    every = short * len(cases), [params for params in cases for _ in short]
    same(llm.generate(*every), plain.generate(*every))
    all_pages_are_back(llm)


def context_ends_alike(llm: LLM, plain: LLM) -> None:
    """Check that requests up to the end of a context of 72 tokens are the same as without drafts.

    Arguments as in ``limits_are_exact``.
    """
    ends = GREEDY.replace(max_tokens=None)
    same(llm.generate(prompts()[:11], ends), plain.generate(prompts()[:11], ends))
    all_pages_are_back(llm)


def follows_distribution(llm: LLM, plain: LLM, count: int = 2000) -> None:
    """Test the third token of ``count`` seeded draws against its marginal.

    The second token is drawn after the prompt's, whether drafts are accepted or not. The third one
    is drawn behind a draft, and counts only if that draft is the second token.

    Other arguments as in ``limits_are_exact``.
    """
    prompt = prompts()[2]
    every = SamplingParams(max_tokens=1, temperature=1.0, logprobs=VOCAB, ignore_eos=True)

    def distributions(rows: list[list[int]]) -> np.ndarray:
        found = np.zeros((len(rows), VOCAB))
        for row, one in zip(found, plain.generate(rows, every), strict=True):
            assert one.logprobs is not None
            row[one.logprobs.top_ids[0]] = np.exp(one.logprobs.top[0])
        return found

    first = distributions([prompt])[0]
    second = first[:, None] * distributions([[*prompt, one] for one in range(VOCAB)])
    behind = [[*prompt, one, two] for one in range(VOCAB) for two in range(VOCAB)]
    expected = second.reshape(-1) @ distributions(behind)
    draws = [
        SamplingParams(max_tokens=3, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(count)
    ]
    tokens = [one.token_ids[2] for one in llm.generate([prompt] * len(draws), draws)]
    assert llm.stats.accepted_tokens > 50
    assert_follows(np.array(tokens), expected / expected.sum())


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # a dense layer and one with experts: a third would cost a fifth of the time of every step
    layers = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return write_config(tmp_path_factory.mktemp("v3"), "v3", vocab_size=VOCAB, **layers)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with engine(folder, 0) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy(plain: LLM) -> list[Completion]:
    return plain.generate(prompts(), GREEDY)


@pytest.fixture(scope="module")
def featured(plain: LLM) -> list[Completion]:
    return plain.generate(prompts(), features())
