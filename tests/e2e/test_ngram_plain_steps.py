"""Steps none of whose rows has an n-gram match are plain decoding steps, and the others verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.step.messages import Stats
from tests.plugins import replaying_runtime, stepping
from tests.support.tiny import write_config

VOCAB = 12
LEAST = 3  #: tokens of a match, so that many texts of so few tokens have none
STEPS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"steps": STEPS},
    "tree": {"steps": STEPS, "topk": 2, "draft_tokens": 6},
}
RUNS: dict[str, dict[str, Any]] = {
    "eager": {"scheduler": {"overlap": False}},
    "overlapped": {"scheduler": {"overlap": True}},
    "replayed": {
        "scheduler": {"overlap": False},
        "graphs": {"use": "replaying", "batch_sizes": [2, 4, 8]},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB)


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 2048},
        "cache": {"use": "none"},
    }
    plugins = ["tests.plugins.stepping", "tests.plugins.replaying"]
    return LLM(model=str(folder), plugins=plugins, **{**base, **config})


def ngram(**options: Any) -> dict[str, Any]:
    return {"use": "ngram", "adaptive": False, "prompt_lookup_min": LEAST, **options}


def prompts() -> list[list[int]]:
    """Return prompts with matches at their ends, and without."""
    rng = np.random.default_rng(5)
    found = [rng.permutation(VOCAB).tolist() for _ in range(5)]
    return [ids[:5] * 2 if i % 2 else ids for i, ids in enumerate(found)]


def matches(text: list[int]) -> bool:
    """Return whether the last tokens of ``text`` occur earlier in it."""
    last = text[-LEAST:]
    return any(text[at : at + LEAST] == last for at in range(len(text) - LEAST))


def expected_shapes(
    steps: list[stepping.Step], texts: list[list[int]], full: DraftShape, late: int
) -> list[tuple[DraftShape, list[int]]]:
    """Return the size of the drafts of each step with decoding rows, and these rows' matches.

    Args:
        steps: the committed steps; the texts begin in the first of them.
        texts: prompt and answer of each sequence, by order of their ids.
        full: the size of the drafts.
        late: number of steps after which the host knows a result.
    """
    ids = sorted({id for step in steps for id in step.gained})
    whole = dict(zip(ids, texts, strict=True))
    left = {id: sum(step.gained.get(id, 0) for step in steps) for id in ids}
    lengths = {id: len(whole[id]) - left[id] for id in ids}
    before: list[dict[int, int]] = []  # tokens of each sequence that has any, after each step
    found: list[tuple[DraftShape, list[int]]] = []
    answered: dict[int, int] = {}
    for at, step in enumerate(steps):
        decoding = [id for id in step.gained if id in answered]
        known = before[at - 1 - late] if at > late else {}
        have = [id not in known or matches(whole[id][: known[id]]) for id in decoding]
        now = [int(matches(whole[id][: answered[id]])) for id in decoding]
        if decoding:
            found.append((full if any(have) else NO_DRAFTS, now))
        for id, count in step.gained.items():
            lengths[id] += count
            answered[id] = lengths[id]
        before.append(dict(answered))
    return found


def check_counters(stats: Stats, found: list[Any]) -> None:
    """Check that a row without a match is no verify step, and that a plain step verifies nothing.

    ``found``: result of ``expected_shapes``.
    """
    verified = sum(sum(now) for shape, now in found if shape.steps)
    plain, full = sorted(stats.drafts, key=lambda one: one.steps)
    assert sum(full.accepted) == verified and not plain.accepted
    assert plain.engine_steps >= sum(not shape.steps for shape, _ in found)
    assert stats.drafted_tokens == verified * (full.tokens - 1)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("run", RUNS)
def test_a_step_without_a_match_is_plain(folder: Path, run: str, drafts: str) -> None:
    """With overlap the host knows of a match one step late; the tokens are the same."""
    with engine(folder) as llm:
        want = [llm.generate([ids], GREEDY)[0].token_ids for ids in prompts()]
    late = int(run == "overlapped")
    together = [prompts()]
    alone = [[ids] for ids in prompts()]
    with engine(folder, speculative=ngram(**DRAFTS[drafts]), **RUNS[run]) as llm:
        full = llm.plan.sizes.draft_shape
        chosen: set[DraftShape | None] = set()
        mixed = False
        stepping.take()
        begun = len(replaying_runtime.NEWEST[0].drafts) if run == "replayed" else 0
        every: list[Any] = []
        for batch in alone + together:
            got = [one.token_ids for one in llm.generate(batch, GREEDY)]
            assert got == [want[prompts().index(ids)] for ids in batch]
            # with overlap, a sequence that has ended is launched once more
            steps = [step for step in stepping.take() if step.gained]
            texts = [ids + answer for ids, answer in zip(batch, got)]
            found = expected_shapes(steps, texts, full, late)
            decoded = [step for step in steps if step.shape is not None]
            assert [step.shape for step in decoded] == [shape for shape, _ in found]
            chosen |= {shape for shape, _ in found}
            mixed |= any(shape.steps and 0 < sum(now) < len(now) for shape, now in found)
            every += found
        assert chosen == {NO_DRAFTS, full} and mixed, "the prompts show every kind of step"
        check_counters(llm.stats, every)
        if run == "replayed":
            replayed = replaying_runtime.NEWEST[0].drafts[begun:]
            assert replayed == [shape for shape, _ in every]
