"""Trees of NextN drafts change only the speed of tokens, and gain the same in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM
from glowplug.entrypoints.front.llm import Completion
from tests.e2e.cuts import CUTS
from tests.plugins import accepting
from tests.support.draft_requests import (
    BASE,
    GREEDY,
    all_pages_are_back,
    around_pages,
    engine,
    features,
    prompts,
    same,
)

#: published settings of (steps, topk, draft_tokens), and the smallest and widest trees
SHAPES = [(1, 2, 2), (1, 4, 5), (2, 2, 5), (2, 4, 4), (3, 4, 7), (5, 4, 8), (3, 8, 24), (5, 8, 64)]


def tree(folder: Path, shape: tuple[int, int, int], **config: Any) -> LLM:
    steps, topk, tokens = shape
    knobs: dict[str, Any] = {"steps": steps, "topk": topk, "draft_tokens": tokens}
    knobs |= {"use": "nextn", "adaptive": False}
    return engine(folder, 0, speculative=knobs, **config)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "/".join(map(str, s)))
def test_every_shape_gives_the_same_tokens(
    folder: Path, shape: tuple[int, int, int], greedy: list[Completion], featured: list[Completion]
) -> None:
    with tree(folder, shape) as llm:
        same(llm.generate(prompts(), GREEDY), greedy)
        same(llm.generate(prompts(), features()), featured)  # now with a warm cache
        stats = llm.stats
        all_pages_are_back(llm)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("variant", list(CUTS))
def test_every_cut_of_the_steps_gives_the_same_tokens(
    folder: Path, variant: str, greedy: list[Completion], featured: list[Completion]
) -> None:
    with tree(folder, (3, 3, 9), **CUTS[variant]) as llm:
        same(llm.generate(prompts(), GREEDY), greedy)
        same(llm.generate(prompts()[::-1], features()[::-1])[::-1], featured)
        all_pages_are_back(llm)


def test_preempted_requests_go_on_where_they_were(folder: Path, plain: LLM) -> None:
    every = [
        params.replace(max_tokens=44, min_tokens=40 if params.min_tokens else 0)
        for params in features()
    ]
    with tree(folder, (3, 4, 8), context_length=200, memory={"kv_tokens": 240}) as llm:
        same(llm.generate(prompts(), every), plain.generate(prompts(), every))
        stats = llm.stats
        all_pages_are_back(llm)
    assert stats.preemptions > 0


def test_a_sequence_of_the_full_context_length_has_room_for_its_trees(
    folder: Path,
) -> None:
    """A draft near the end may be stored behind the last position of the sequence."""
    ends = [params.replace(max_tokens=112 - len(ids)) for ids, params in zip(prompts(), features())]
    short = {"context_length": 112}
    with (
        tree(folder, (2, 6, 12), cache={"use": "none"}, **short) as llm,
        engine(folder, 0, **short) as plain,
    ):
        same(llm.generate(prompts(), ends), plain.generate(prompts(), ends))


def test_a_request_gains_the_same_in_any_company(folder: Path) -> None:
    accepting.take()
    shape = (3, 3, 9)
    some = around_pages(prompts())
    with tree(folder, shape, cache={"use": "none"}, scheduler={"overlap": False}) as llm:
        for ids in some:
            llm.generate([ids], GREEDY)
        alone = accepting.take()
    assert any(count > 2 for row in alone for count in row)
    for variant in ("batched", "no_overlap", "chunked", "chunked_one", "page_1", "two_rows"):
        with tree(folder, shape, **CUTS[variant]) as llm:
            llm.generate(some, GREEDY)
            assert accepting.take() == alone, variant
            warm = llm.generate(some, GREEDY)
            assert sum(one.cached_tokens for one in warm) > 0
            assert accepting.take() == alone, f"{variant}, with a warm cache"


def test_a_tree_beside_attention_for_chains_runs_as_a_chain(
    folder: Path, greedy: list[Completion]
) -> None:
    knobs = {"use": "nextn", "adaptive": False, "steps": 3, "topk": 4}
    with LLM(
        model=str(folder),
        plugins=["tests.plugins.chains_only"],
        attention={"use": "chains_only"},
        speculative=knobs,
        **BASE,
    ) as llm:
        same(llm.generate(prompts(), GREEDY), greedy)
        assert llm.plan.sizes.width == 4


def test_a_tree_gains_more_than_its_chain(folder: Path) -> None:
    gained = []
    for shape in ((3, 1, 4), (3, 4, 20)):
        with tree(folder, shape) as llm:
            llm.generate(prompts(), GREEDY)
            gained.append(llm.stats.accepted_tokens / llm.stats.steps)
    assert gained[1] > 1.2 * gained[0]
