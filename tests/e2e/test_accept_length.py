"""Drafting does not change prefix hits and pages, and accept lengths do not depend on batches,
caches or layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM
from glowplug.core.step.messages import Abort, Submit, packed_ids
from glowplug.core.step.request import SamplingParams
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from tests.support.combinations import SEED, VOCAB, Combination, drive, plugins, reference
from tests.support.slow_cases import some_slow, some_slow_rows

WEIGHTS = {"use": "agreeing", "seed": SEED}
ALONE = Combination(steps=2)
VARIANTS = {
    "together": ALONE,
    "no overlap": replace(ALONE, overlap=False),
    "no radix": replace(ALONE, radix=False),
    "chunked": replace(ALONE, chunked=True),
    "tp2": replace(ALONE, tp=2),
    "tp4 no overlap": replace(ALONE, tp=4, overlap=False),
    "ep2": replace(ALONE, tp=2, ep=2),
    "ep4 static": replace(ALONE, tp=4, ep=4, exchange="all_to_all_static"),
    "dp2": replace(ALONE, tp=2, dp=2),
    "dp4 chunked": replace(ALONE, tp=4, dp=4, chunked=True),
    "dp2 ep4": replace(ALONE, tp=4, ep=4, dp=2),
    "dp4 ep2 no overlap": replace(ALONE, tp=4, ep=2, dp=4, overlap=False),
}

SLOW = ("tp2", "tp4 no overlap", "ep2", "dp2", "dp4 chunked", "dp2 ep4")  #: 4 to 7 s each


def engine(one: Combination, folder: Path, **changes: Any) -> RankSet:
    """Return ranks with room for every request at once; ``changes`` replace sections of the
    configuration.
    """
    config = one.config(folder)
    config |= {
        "memory": {"kv_tokens": 2048},
        "scheduler": {**config["scheduler"], "max_running_requests": 8},
        "weights": WEIGHTS,
    }
    return RankSet(rank_plan({**config, **changes}, plugins()), plugins())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory.mktemp("model")).folder


def prompts(count: int = 10) -> list[list[int]]:
    """Return prompts of uneven lengths around page borders; later ones begin like earlier ones."""
    rng = np.random.default_rng(5)
    found = [rng.integers(2, VOCAB, length).tolist() for length in (1, 3, 4, 5, 8, 17)]
    while len(found) < count:
        found.append(found[len(found) % 3 + 3] + rng.integers(2, VOCAB, len(found)).tolist())
    return found


def asked(first: int = 0) -> list[Submit]:
    return [submit(first + i, prompt, 8 + 2 * i) for i, prompt in enumerate(prompts())]


TREE = replace(ALONE, steps=3, topk=3)
TREES = {
    "together": TREE,
    "no overlap": replace(TREE, overlap=False),
    "chunked": replace(TREE, chunked=True),
    "tp2": replace(TREE, tp=2),
    "dp2": replace(TREE, tp=2, dp=2),
    "dp2 ep4": replace(TREE, tp=4, ep=4, dp=2),
}


def gained_alone(one: Combination, folder: Path) -> list[list[int]]:
    """Tokens a step of each request run alone: nothing else in the batch, nothing in the cache."""
    with engine(replace(one, radix=False), folder) as ranks:
        for request in asked():
            ranks.run([request])
        return [ranks.collected[i].counts for i in range(len(prompts()))]


@pytest.fixture(scope="module")
def alone_with_trees(folder: Path) -> list[list[int]]:
    return gained_alone(TREE, folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    counts = gained_alone(ALONE, folder)
    drafted = sum(len(steps) - 1 for steps in counts)
    assert 1.2 < sum(sum(steps[1:]) for steps in counts) / drafted < 2.8, (
        "some drafts have to be accepted"
    )
    return counts


@pytest.mark.parametrize("name", some_slow(VARIANTS, SLOW))
def test_accept_lengths_depend_on_nothing_around(
    folder: Path, alone: list[list[int]], name: str
) -> None:
    """Each request gains the same tokens in each step: in batches, padded groups and split models,
    with a cold and a warm cache.
    """
    gains_as_alone(VARIANTS[name], folder, alone)


@pytest.mark.parametrize("name", some_slow(TREES, ("chunked", "tp2", "dp2")))
def test_trees_gain_the_same_in_any_company(
    folder: Path, alone_with_trees: list[list[int]], alone: list[list[int]], name: str
) -> None:
    gains_as_alone(TREES[name], folder, alone_with_trees)
    steps = [sum(len(row) for row in found) for found in (alone_with_trees, alone)]
    assert steps[0] < steps[1], "wider drafts need fewer steps"


def gains_as_alone(one: Combination, folder: Path, alone: list[list[int]]) -> None:
    with engine(one, folder) as ranks:
        ranks.run(asked())
        ranks.run(asked(100))
        collected = ranks.collected
        ranks.check_idle()
    for first in (0, 100):
        assert [collected[first + i].counts for i in range(len(alone))] == alone, first
    hits = [collected[100 + i].admitted for i in range(len(alone))]
    assert (sum(found.cached_tokens for found in hits if found) > 0) == one.radix


HITS = [
    (layout, steps)
    for layout in (Combination(), Combination(tp=2), Combination(tp=4, ep=2, dp=2))
    for steps in (1, 3)
]


@pytest.mark.parametrize(
    ("layout", "steps"),
    some_slow_rows(HITS, [HITS[0], HITS[3], HITS[5]]),  # each layout runs with one of the steps
    ids=lambda part: part.name if isinstance(part, Combination) else str(part),
)
def test_prefix_hits_are_those_without_drafts(
    folder: Path, layout: Combination, steps: int
) -> None:
    """Conversations have three rounds, each continuing the one before, so pages of answers are hit
    as well.
    """

    def hits(one: Combination) -> list[int]:
        said, found = prompts(6), []
        with engine(
            one, folder, context_length=160, scheduler={"chunk_size": 16, "max_running_requests": 8}
        ) as ranks:
            for turn in range(3):
                ids = [turn * 100 + i for i in range(len(said))]
                collected = ranks.run(
                    [submit(id, words, 9 + id % 5) for id, words in zip(ids, said)]
                )
                found += [
                    admitted.cached_tokens for id in ids if (admitted := collected[id].admitted)
                ]
                said = [
                    words + collected[id].tokens + [3 + turn, 4, 5] for id, words in zip(ids, said)
                ]
        return found

    without = hits(layout)
    assert sum(without) > 100 and hits(replace(layout, steps=steps)) == without


PAGES = [
    Combination(tp=2, steps=1),
    Combination(tp=4, ep=4, dp=2, steps=2, overlap=False),
    Combination(tp=4, dp=4, steps=3, chunked=True),
    Combination(steps=2),
]


@pytest.mark.parametrize(
    "one",
    some_slow(PAGES, PAGES[::2]),  # groups and chunks free theirs in test_combinations.py, too
    ids=lambda one: one.name,
)
def test_every_page_comes_back(
    folder: Path, one: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are free after preemption and an abort (``drive``), refusals, deadlines, and rows whose
    logits are NaN.
    """
    config = {**one.config(folder), "weights": WEIGHTS}
    with RankSet(rank_plan(config, plugins()), plugins()) as ranks:
        drive(ranks)
        late = Submit(101, packed_ids([6, 7]), SamplingParams(max_tokens=40), timeout=1e-4)
        ranks.run([submit(100, [5] * 200, 4), late, submit(102, [8] * 5, 30)])
        spoilt = spoil(ranks, monkeypatch)
        ranks.turn([submit(200 + i, prompt, 30) for i, prompt in enumerate(prompts(8))])
        for _ in range(4):
            ranks.turn()
        spoilt.append(True)
        ranks.turn([Abort([203, 204])])
        spoilt.clear()
        collected = ranks.run()
        ranks.check_idle()
        data = ranks.control("check").data
        for reply in data.get("ranks", [data]):
            assert reply["free"] + reply["evictable"] == reply["total"]
    ends = {id: end.finished.reason for id, end in collected.items() if end.finished}
    assert (
        ends[100] == "error"
        and ends[101] == "timeout"
        and ends[102] == "length"
        and ends[203] == "abort"
    )
    assert "error" in [ends[id] for id in range(200, 208)]


def spoil(ranks: RankSet, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make the first row of logits NaN on every rank while the returned list is not empty."""
    on: list[bool] = []
    for rank in ranks.engines:
        logits = rank.runner.step_logits
        honest = logits.of

        def spoilt(hidden: torch.Tensor, honest: Any = honest) -> torch.Tensor:
            scores: torch.Tensor = honest(hidden)
            if on and len(scores):
                scores[0] = float("nan")
            return scores

        monkeypatch.setattr(logits, "of", spoilt)
    return on


# ---- the embedded model --------------------------------------------------------------------------

QUESTIONS = (
    "What is 27 + 15?",
    "What is 902 - 417?",
    "Sort these numbers: 41, 7, 93",
    "Who are you?",
)


@pytest.fixture(scope="module")
def conversations() -> list[list[int]]:
    with LLM(model="embedded") as llm:
        assert llm.tokenizer is not None
        texts = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], thinking=i % 2 == 0
            )
            for i, question in enumerate(QUESTIONS)
        ]
        return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def embedded_counts(
    conversations: Sequence[list[int]],
    steps: int,
    *,
    one_by_one: bool = False,
    overlap: bool = True,
    **parallel: int,
) -> list[list[int]]:
    """Return the tokens a step of each answer; with several conversations together, each runs
    twice, so that the second run hits the cache.
    """
    config: dict[str, Any] = {
        "model": "embedded",
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 2048},
        "speculative": {"use": "nextn", "adaptive": False, "steps": steps},
        "scheduler": {"max_running_requests": 8, "overlap": overlap},
    }
    if parallel:
        config["parallel"] = [{"use": use, "size": size} for use, size in parallel.items()]
    with RankSet(rank_plan(config, plugins()), plugins()) as ranks:
        rounds = (
            [[submit(i, prompt, 32)] for i, prompt in enumerate(conversations)]
            if one_by_one
            else [
                [submit(first + i, prompt, 32) for i, prompt in enumerate(conversations)]
                for first in (100, 0)
            ]
        )
        for requests in rounds:
            ranks.run(requests)
        ranks.check_idle()
        return [ranks.collected[i].counts for i in range(len(conversations))]


@pytest.mark.parametrize("steps", some_slow([1, 3], [1]))
def test_accept_lengths_of_the_embedded_model(conversations: list[list[int]], steps: int) -> None:
    alone = embedded_counts(conversations, steps, one_by_one=True)
    assert sum(map(sum, alone)) / sum(map(len, alone)) > 1.5, (
        "the trained layer's drafts have to be accepted"
    )
    assert embedded_counts(conversations, steps) == alone
    assert embedded_counts(conversations, steps, overlap=False, tensor=2) == alone
    assert embedded_counts(conversations, steps, tensor=2, ep_moe=2, dp_attention=2) == alone
