"""NextN speculation changes only the speed of tokens: not one token, not a page, not a prefix
hit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.entrypoints.front.llm import Completion
from glowplug.models.embedded.tasks import held_out_tasks
from tests.e2e.cuts import CUTS
from tests.plugins import accepting
from tests.support.draft_requests import (
    GREEDY,
    MANY_ROWS,
    all_pages_are_back,
    around_pages,
    context_ends_alike,
    engine,
    features,
    follows_distribution,
    limits_are_exact,
    prompts,
    same,
)
from tests.support.slow_cases import some_slow

VARIANTS: dict[str, dict[str, Any]] = {
    **CUTS,
    "naive": {"attention": {"use": "torch_mla", "absorb": False}},
}


@pytest.mark.parametrize(
    ("variant", "steps"),
    [
        *(("batched", steps) for steps in (1, 2, 3)),
        *((name, 1 + 2 * (i % 2)) for i, name in enumerate(VARIANTS) if i),
        *(
            pytest.param(name, steps, marks=pytest.mark.slow)  # with the other width: see above
            for name, steps in (("no_overlap", 1), ("chunked", 1), ("page_1", 3))
        ),
    ],
)
def test_same_tokens_at_every_width(
    folder: Path, greedy: list[Completion], featured: list[Completion], variant: str, steps: int
) -> None:
    with engine(folder, steps, **VARIANTS[variant]) as llm:
        same(llm.generate(prompts(), GREEDY), greedy)
        # now with a warm cache, and in another order
        same(llm.generate(prompts()[::-1], features()[::-1])[::-1], featured)
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
        params.replace(max_tokens=44, min_tokens=40 if params.min_tokens else 0)
        for params in features()
    ]
    with engine(
        folder, 3, context_length=200, memory={"kv_tokens": 208}, scheduler=scheduler
    ) as llm:
        same(llm.generate(prompts(), every), plain.generate(prompts(), every))
        stats = llm.stats
        all_pages_are_back(llm)
    assert stats.preemptions > 0


@pytest.mark.parametrize("steps", some_slow([1, 3], [1]))
def test_a_request_gains_the_same_in_any_company(folder: Path, steps: int) -> None:
    """Each request gains the same tokens in each step: alone, batched, with and without a cached
    prefix, in chunks.
    """
    accepting.take()
    some = [*around_pages(prompts()), prompts()[10]]  # 65 tokens, so that pages of 64 are hit
    with engine(folder, steps, cache={"use": "none"}, scheduler={"overlap": False}) as llm:
        for ids in some:
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
            llm.generate(some, GREEDY)
            assert accepting.take() == alone, variant
            warm = llm.generate(some, GREEDY)
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


@pytest.mark.parametrize("steps", some_slow([1, 3], [1]))
def test_every_limit_is_exact(folder: Path, plain: LLM, steps: int) -> None:
    """Limits are max_tokens from 1 on, the context's end, and ends by eos: never a token more
    or less.
    """
    with engine(folder, steps) as llm:
        limits_are_exact(llm, plain)
    with (
        engine(folder, steps, context_length=72) as llm,
        engine(folder, 0, context_length=72) as reference,
    ):
        context_ends_alike(llm, reference)


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
    drafts = {"use": "nextn", "adaptive": False, **knobs}
    with engine(folder, 0, speculative=drafts, scheduler=MANY_ROWS) as llm:
        follows_distribution(llm, plain)


CHAT = [[{"role": "user", "content": task.prompt}] for task in held_out_tasks(24)]
ANSWER = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def answers() -> tuple[list[Completion], list[Completion]]:
    """Return the answers without drafts, and those of a few chats cut by stop strings."""
    with LLM("embedded", dtype="float32", device="cpu") as llm:
        return llm.chat(CHAT, ANSWER), llm.chat(CHAT[:6], ANSWER.replace(stop=["e", "1"]))


@pytest.mark.parametrize(
    ("steps", "topk", "least"), [(1, 1, 1.5), (3, 1, 1.5), (3, 4, 1.9)], ids=["1", "3", "tree"]
)
def test_the_embedded_model_accepts_most_drafts(
    answers: tuple[list[Completion], list[Completion]], steps: int, topk: int, least: float
) -> None:
    """On held-out chat the answers are those of width one, and at one drafted token at least every
    second draft is accepted.
    """
    want, cut = answers
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
