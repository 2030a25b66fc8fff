"""Sampling and text through the whole engine: distribution, mixtures in one batch, edits, stop
strings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.step.request import LEAST_REPETITION_PENALTY
from glowplug.core.testing.suites.sampler import assert_follows
from tests.support.tiny import write_config
from tests.support.tiny_tokenizer import write_folder

VOCAB = 402
PROMPT = [5, 9, 300, 41, 77]
ENDS = 1  #: the tokenizer's eos


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = write_folder(write_config(tmp_path_factory.mktemp("v3"), "v3", vocab_size=VOCAB))
    config: dict[str, Any] = {
        "weights": {"use": "random"},
        "dtype": "float32",
        "context_length": 256,
        "memory": {"kv_tokens": 8192},
        "scheduler": {"max_running_requests": 64},
    }
    with LLM(model=str(folder), **config) as engine:
        yield engine


def make(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **changes})


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 5e-324},
    {"temperature": 1e-5, "top_p": 5e-324},
    {"temperature": 100.0, "min_p": 5e-324},
    {"repetition_penalty": LEAST_REPETITION_PENALTY},
    {"repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {
        "repetition_penalty": LEAST_REPETITION_PENALTY,
        "temperature": 1e-5,
        "logit_bias": dict.fromkeys(range(100), 100.0),
    },
]


def test_extreme_parameters_leave_the_logits_finite(llm: LLM) -> None:
    done = llm.generate([PROMPT] * len(EXTREMES), [make(**one) for one in EXTREMES])
    assert [(one.finish_reason, one.error) for one in done] == [("length", None)] * len(EXTREMES)


def test_first_tokens_follow_the_models_distribution(llm: LLM) -> None:
    """The candidates' raw log-probabilities, one at a time, are compared with 1500 seeded draws
    among them all.
    """
    candidates = [2, 17, 60, 111, 200, 263, 350, 401]
    forced = [make(max_tokens=1, allowed_token_ids=[token], logprobs=0) for token in candidates]
    scores = [
        done.logprobs.token[0]
        for done in llm.generate([PROMPT] * len(forced), forced)
        if done.logprobs
    ]
    temperature = 0.7
    weights = np.exp((np.array(scores) - max(scores)) / temperature)
    one = make(max_tokens=1, allowed_token_ids=candidates, temperature=temperature)
    draws = [one.replace(seed=seed) for seed in range(1500)]
    tokens = [
        candidates.index(done.token_ids[0]) for done in llm.generate([PROMPT] * len(draws), draws)
    ]
    assert_follows(np.array(tokens), weights / weights.sum())


def mixtures() -> list[SamplingParams]:
    return [
        make(temperature=0.0),
        make(),
        make(temperature=1.4, top_k=9),
        make(top_p=0.6),
        make(min_p=0.1, logprobs=3),
        make(temperature=0.0, repetition_penalty=1.3, logprobs=0),
        make(presence_penalty=1.5, frequency_penalty=0.5),
        make(logit_bias={7: 6.0, 8: -100.0}),
        make(allowed_token_ids=list(range(20, 40)), top_k=5),
        make(min_tokens=6, stop_token_ids=[7, 9], logit_bias={7: 8.0, 9: 8.0}),
        make(seed=-9, max_tokens=3),
        make(temperature=0.0, logprobs=5, prompt_logprobs=2),
    ]


def test_a_mixed_batch_gives_each_request_its_own(llm: LLM) -> None:
    prompts = [[*PROMPT[: 1 + i % 5], i] for i in range(len(mixtures()))]
    alone = [
        llm.generate([prompt], params)[0]
        for prompt, params in zip(prompts, mixtures(), strict=True)
    ]
    together = llm.generate(prompts, mixtures())
    backwards = llm.generate(prompts[::-1], mixtures()[::-1])[::-1]
    for one, *others, params in zip(alone, together, backwards, mixtures(), strict=True):
        for other in others:
            assert other.token_ids == one.token_ids, params
            assert (other.logprobs is None) == (params.logprobs is None)
        if one.logprobs is not None:
            assert [len(row) for row in one.logprobs.top_ids] == [params.logprobs] * len(
                one.token_ids
            )
            assert all(score <= 0 for score in one.logprobs.token)


def test_greedy_tokens_are_the_most_likely(llm: LLM) -> None:
    (done,) = llm.generate([PROMPT], make(temperature=0.0, logprobs=1))
    assert done.logprobs is not None and [row[0] for row in done.logprobs.top_ids] == done.token_ids
    assert np.allclose([row[0] for row in done.logprobs.top], done.logprobs.token)


def test_min_tokens_and_stop_ids(llm: LLM) -> None:
    push = {ENDS: 100.0}
    (soon,) = llm.generate([PROMPT], make(ignore_eos=False, logit_bias=push))
    assert soon.token_ids == [ENDS] and soon.finish_reason == "stop" and soon.text == ""
    (later,) = llm.generate([PROMPT], make(ignore_eos=False, logit_bias=push, min_tokens=5))
    assert (
        later.token_ids[-1] == ENDS
        and len(later.token_ids) == 6
        and ENDS not in later.token_ids[:-1]
    )
    (never,) = llm.generate([PROMPT], make(logit_bias=push))
    assert never.token_ids == [ENDS] * 12 and never.finish_reason == "length"


def test_frequency_penalty_spreads_tokens(llm: LLM) -> None:
    (stuck,) = llm.generate([PROMPT], make(temperature=0.0, logit_bias={50: 60.0, 51: 30.0}))
    assert stuck.token_ids == [50] * 12
    (spread,) = llm.generate(
        [PROMPT],
        make(temperature=0.0, logit_bias=dict.fromkeys((50, 51, 52), 100.0), frequency_penalty=2.0),
    )
    counts = [spread.token_ids.count(token) for token in (50, 51, 52)]
    assert sum(counts) == 12 and max(counts) - min(counts) <= 1


def test_stop_strings_end_a_sequence_over_token_boundaries(llm: LLM) -> None:
    letters = llm.tokenizer.encode("abcdefgh nopq", add_special_tokens=False)  # type: ignore[union-attr]
    params = make(allowed_token_ids=letters, max_tokens=40, temperature=1.5)
    (whole,) = llm.generate([PROMPT], params)
    assert len(whole.text) > 20 and whole.finish_reason == "length"
    for start, size in itertools.product((3, 11), (1, 4)):
        stop = whole.text[start : start + size]
        at = whole.text.index(stop)
        (cut,) = llm.generate([PROMPT], params.replace(stop=[stop, "never here"]))
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
        (kept,) = llm.generate(
            [PROMPT], params.replace(stop=[stop], include_stop_str_in_output=True)
        )
        assert kept.text == whole.text[: at + size]
        deltas = list(llm.stream(PROMPT, params.replace(stop=[stop])))
        assert (
            "".join(delta.text for delta in deltas) == cut.text and deltas[-1].stop_reason == stop
        )
