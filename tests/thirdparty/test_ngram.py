"""The sample of n-gram drafts of a third party passes the suite and changes no greedy token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.api import DraftShape, PlanRefused
from glowplug.core.protocols import Limits, SpeculativeAlgorithm, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from tests.support.tiny import write_config
from tests.thirdparty.packages import FOLDER

NAME = "glowplug-ngram"
PLUGIN = ["glowplug_ngram.plugin", "tests.plugins.replaying"]
VOCAB = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


def algorithm(limits: Limits, **options: Any) -> Any:
    from glowplug_ngram.plugin import PromptCopyOptions
    from glowplug_ngram.runtime import PromptCopy

    made = PromptCopyOptions(steps=3, **options)
    found = PromptCopy(made, bare_plan(width=4, draft_shape=made.draft_shape()), Worker())
    found.reserve(limits)
    return found


class TestPromptCopy(SpeculativeSuite):
    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        found: SpeculativeAlgorithm = algorithm(limits)
        return found


def drafts_of(text: list[int], **options: Any) -> list[int]:
    made = algorithm(Limits(1, 20, 9, 4, VOCAB), **options)
    table = torch.full((1, 20), 9, dtype=torch.int32)
    table[0, : len(text)] = torch.tensor(text)
    shape = DraftShape.chain(3)
    found: list[int] = made.propose(table, torch.tensor([0]), torch.tensor([len(text)]), shape)[
        0
    ].tolist()
    return found


@pytest.mark.parametrize(
    ("text", "options", "drafts"),
    [
        ([5, 6, 7, 8, 1, 5, 6], {}, [7, 8, 1]),
        ([5, 6, 7, 1, 2, 6, 8, 5, 6], {}, [7, 1, 2]),  # two equal tokens before a later one
        ([5, 6, 7, 1, 2, 6, 8, 5, 6], {"longest": 1}, [8, 5, 6]),
        ([6, 7, 6, 8, 6], {}, [8, 6, -1]),  # the latest occurrence, which the row ends soon after
        ([5, 6, 7, 1, 6], {"shortest": 2}, [-1, -1, -1]),
        ([1, 2, 3], {}, [-1, -1, -1]),
        ([4], {}, [-1, -1, -1]),
    ],
)
def test_drafts_continue_the_longest_and_latest_occurrence(
    text: list[int], options: dict[str, int], drafts: list[int]
) -> None:
    assert drafts_of(text, **options) == drafts


def test_drafts_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        text = rng.integers(0, 3, int(rng.integers(1, 17))).tolist()
        end, best = len(text), None
        for size in (3, 2, 1):
            starts = [at for at in range(end - size) if text[at : at + size] == text[end - size :]]
            if starts and best is None:
                best = starts[-1] + size
        follow = [] if best is None else text[best : best + 3]
        assert drafts_of(text, longest=3) == (follow + [-1] * 3)[:3], text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB)


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 2048},
        "attention": {"page_size": 4},
    }
    return LLM(model=str(folder), plugins=PLUGIN, **{**base, **config})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"scheduler": {"chunk_size": 7, "overlap": False}},
        # without overlap, because functions overwrite the results of the step in flight
        {"graphs": {"use": "replaying", "batch_sizes": [4]}, "scheduler": {"overlap": False}},
    ],
)
def test_greedy_tokens_are_those_without_drafts(folder: Path, more: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    line = rng.integers(4, VOCAB, 7).tolist()
    prompts = [(line * 5)[:n] for n in (1, 8, 20, 33)]
    with engine(folder) as llm:
        want = [one.token_ids for one in llm.generate(prompts, GREEDY)]
    own = {"use": "prompt_copy", "adaptive": False}
    with engine(folder, speculative=own, **more) as llm:
        for _ in range(2):  # the second time with a warm cache
            assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == want
        assert 0 < llm.stats.accepted_tokens < llm.stats.drafted_tokens
        (counts,) = llm.stats.drafts
        assert 0 == counts.absent[0] < counts.absent[-1]
        assert llm.plan.choice("speculative").name == "prompt_copy"
        assert "draft state" in {line.name for line in llm.plan.budget}


def test_lengths_that_exclude_each_other_are_refused(folder: Path) -> None:
    with pytest.raises(PlanRefused) as caught:
        engine(folder, speculative={"use": "prompt_copy", "shortest": 5})
    assert [refusal.field for refusal in caught.value.refusals] == ["speculative.shortest"]
