"""NextN speculation changes only the speed of tokens: not one token, not a page, not a prefix
hit.
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
from glowplug.models.embedded.tasks import held_out_tasks
from tests.e2e.cuts import CUTS
from tests.plugins import accepting
from tests.support.tiny import write_config

VOCAB = 12  #: so few that a random draft is sometimes right
ENDS = 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", vocab_size=VOCAB, num_nextn_predict_layers=1
    )


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


def features() -> list[SamplingParams]:
    """Return one request for each sampling feature, as many as there are prompts."""

    def make(**changes: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 20, "seed": 3, "ignore_eos": True, **changes})

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


VARIANTS: dict[str, dict[str, Any]] = {
    **CUTS,
    "naive": {"attention": {"use": "torch_mla", "absorb": False}},
}


@pytest.mark.parametrize(
    ("variant", "steps"),
    [
        *(("batched", steps) for steps in (1, 2, 3)),
        *((name, 1 + 2 * (i % 2)) for i, name in enumerate(VARIANTS) if i),
        ("no_overlap", 1),
        ("chunked", 3),
        ("page_1", 3),
    ],
)
def test_same_tokens_at_every_width(
    folder: Path, greedy: list[Completion], featured: list[Completion], variant: str, steps: int
) -> None:
    with engine(folder, steps, **VARIANTS[variant]) as llm:
        same(llm.generate(prompts(), GREEDY), greedy)
        same(llm.generate(prompts(), features()), featured)  # now with a warm cache
        same(llm.generate(prompts()[::-1], GREEDY)[::-1], greedy)
        stats = llm.stats
        all_pages_are_back(llm)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize(
    "scheduler", [{}, {"chunk_size": 9, "overlap": False}], ids=["whole", "chunked"]
)
def test_preempted_requests_go_on_where_they_were(
    folder: Path, plain: LLM, scheduler: dict[str, Any]
) -> None:
    every = [
        params.replace(max_tokens=80, min_tokens=70 if params.min_tokens else 0)
        for params in features()
    ]
    with engine(
        folder, 3, context_length=200, memory={"kv_tokens": 208}, scheduler=scheduler
    ) as llm:
        same(llm.generate(prompts(), every), plain.generate(prompts(), every))
        stats = llm.stats
        all_pages_are_back(llm)
    assert stats.preemptions > 0


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_gains_the_same_in_any_company(folder: Path, steps: int) -> None:
    """Each request gains the same tokens in each step: alone, batched, with and without a cached
    prefix, in chunks.
    """
    accepting.take()
    with engine(folder, steps, cache={"use": "none"}, scheduler={"overlap": False}) as llm:
        for ids in prompts():
            llm.generate([ids], GREEDY)
        alone = accepting.take()
    assert any(count > 1 for row in alone for count in row)
    for variant in (
        "batched",
        "no_overlap",
        "chunked",
        "chunked_one",
        "page_1",
        "page_64",
        "two_rows",
    ):
        with engine(folder, steps, **VARIANTS[variant]) as llm:
            llm.generate(prompts(), GREEDY)
            assert accepting.take() == alone, variant
            warm = llm.generate(prompts(), GREEDY)
            assert sum(one.cached_tokens for one in warm) > 0
            assert accepting.take() == alone, f"{variant}, with a warm cache"


def test_a_cached_prefix_is_hit_as_often(folder: Path) -> None:
    """Prompts that continue earlier outputs find the same cached tokens as without speculation."""
    found = []
    for steps in (0, 1, 3):
        with engine(folder, steps) as llm:
            first = llm.generate(prompts(), GREEDY)
            further = [one.prompt_token_ids + one.token_ids + [5, 6, 7] for one in first]
            second = llm.generate(further, GREEDY)
            found.append([[one.cached_tokens for one in run] for run in (first, second)])
            assert sum(found[-1][1]) > 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("steps", [1, 3])
def test_every_limit_is_exact(folder: Path, plain: LLM, steps: int) -> None:
    """Limits are max_tokens from 1 on, the context's end, and ends by eos: never a token more
    or less.
    """
    short = prompts()[2:6]
    cases = [GREEDY.replace(max_tokens=count) for count in range(1, 10)]
    cases += [
        GREEDY.replace(max_tokens=None, temperature=1.0, seed=seed, ignore_eos=False)
        for seed in range(6)
    ]
    cases += [
        GREEDY.replace(max_tokens=150, stop_token_ids=[2, 3], min_tokens=count)
        for count in (0, 4, 7)
    ]
    with engine(folder, steps) as llm:
        for params in cases:
            same(llm.generate(short, params), plain.generate(short, params))
        all_pages_are_back(llm)
    with (
        engine(folder, steps, context_length=72) as llm,
        engine(folder, 0, context_length=72) as reference,
    ):
        ends = GREEDY.replace(max_tokens=None)
        same(llm.generate(prompts()[:11], ends), reference.generate(prompts()[:11], ends))
        all_pages_are_back(llm)


def test_several_choices_and_processes(folder: Path, plain: LLM) -> None:
    params = GREEDY.replace(n=3, temperature=0.9, seed=8)
    want = plain.generate(prompts()[:4], params)
    with engine(folder, 2, executor={"use": "multiprocess"}) as llm:
        got = llm.generate(prompts()[:4], params)
    assert [[c.token_ids for c in one.choices] for one in got] == [
        [c.token_ids for c in one.choices] for one in want
    ]


def test_aborted_requests_leave_nothing_behind(folder: Path, greedy: list[Completion]) -> None:
    with engine(folder, 2) as llm:
        for count in range(1, 6):
            stream = iter(llm.stream(prompts()[3], GREEDY.replace(max_tokens=120)))
            for _ in range(count):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
        same(llm.generate(prompts(), GREEDY), greedy)
        all_pages_are_back(llm)


@pytest.mark.parametrize("knobs", [{"steps": 2}, {"steps": 2, "topk": 3}], ids=["chain", "tree"])
def test_verified_tokens_follow_the_targets_distribution(
    folder: Path, plain: LLM, knobs: dict[str, int]
) -> None:
    """The second token of 2000 seeded draws, which is a verified draft or its correction, is tested
    against its marginal.
    """
    prompt = prompts()[2]
    every = SamplingParams(max_tokens=1, temperature=1.0, logprobs=VOCAB, ignore_eos=True)

    def distribution(ids: list[int]) -> np.ndarray:
        scores = plain.generate([ids], every)[0].logprobs
        assert scores is not None
        found = np.zeros(VOCAB)
        found[scores.top_ids[0]] = np.exp(scores.top[0])
        return found

    expected = sum(
        share * distribution([*prompt, token]) for token, share in enumerate(distribution(prompt))
    )
    draws = [
        SamplingParams(max_tokens=3, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(2000)
    ]
    with engine(folder, 0, speculative={"use": "nextn", "adaptive": False, **knobs}) as llm:
        tokens = [one.token_ids[1] for one in llm.generate([prompt] * len(draws), draws)]
        assert llm.stats.accepted_tokens > 50
    assert_follows(np.array(tokens), expected / expected.sum())


CHAT = [[{"role": "user", "content": task.prompt}] for task in held_out_tasks(40)]
ANSWER = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.mark.parametrize(
    ("steps", "topk", "least"), [(1, 1, 1.5), (3, 1, 1.5), (3, 4, 1.9)], ids=["1", "3", "tree"]
)
def test_the_embedded_model_accepts_most_drafts(steps: int, topk: int, least: float) -> None:
    """On held-out chat the answers are those of width one, and at one drafted token at least every
    second draft is accepted.
    """
    with LLM("embedded", dtype="float32", device="cpu") as llm:
        want = llm.chat(CHAT, ANSWER)
        cut = llm.chat(CHAT[:6], ANSWER.replace(stop=["e", "1"]))
    knobs = {"use": "nextn", "adaptive": False, "steps": steps, "topk": topk}
    with LLM("embedded", dtype="float32", device="cpu", speculative=knobs) as llm:
        got = llm.chat(CHAT, ANSWER)
        stats = llm.stats
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
        assert [
            (c.text, c.stop_reason) for c in llm.chat(CHAT[:6], ANSWER.replace(stop=["e", "1"]))
        ] == [(c.text, c.stop_reason) for c in cut]
        all_pages_are_back(llm)
        drafts = llm.plan.sizes.width - 1
    length = 1 + stats.accepted_tokens / (stats.drafted_tokens / drafts)
    print(f"{steps} steps of {topk}: accept length {length:.2f}")
    assert length >= least
