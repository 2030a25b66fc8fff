"""Drafts over a part of the vocabulary: the same tokens, and only drafts of that part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.errors import ConfigError, PlanRefused
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.entrypoints.front.llm import Completion
from glowplug.plugins.speculative.shared import frequent_tokens
from tests.support.draft_requests import BASE, GREEDY, VOCAB, engine, features, prompts, same
from tests.support.eagle import write_random_head
from tests.support.tiny import write_config

CHAIN = {"use": "nextn", "adaptive": False, "steps": 3}
TREE = {"use": "nextn", "adaptive": False, "steps": 2, "topk": 3}
EAGLE = {**CHAIN, "use": "eagle"}
STANDALONE = {**TREE, "use": "standalone"}


def with_draft(folder: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return ``knobs`` with the folder of a random draft, if the algorithm needs one."""
    if knobs["use"] == "nextn":
        return knobs
    draft = folder.parent / "draft"
    if knobs["use"] == "eagle":
        draft = write_random_head(folder)
    else:
        write_config(draft, "llama", vocab_size=VOCAB)
    return {**knobs, "draft_model": str(draft)}


def gained(folder: Path, knobs: dict[str, Any], want: list[Completion]) -> float:
    """Return the accepted drafts a step, after checking the tokens."""
    with engine(folder, 0, speculative=knobs) as llm:
        same(llm.generate(prompts(), GREEDY), want)
        return llm.stats.accepted_tokens / llm.stats.drafted_tokens


@pytest.mark.parametrize(
    "knobs", [CHAIN, TREE, EAGLE, STANDALONE], ids=["chain", "tree", "eagle", "standalone"]
)
def test_a_file_of_all_tokens_gains_as_much_as_none(
    folder: Path, greedy: list[Completion], knobs: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(list(range(VOCAB))[::-1]))
    knobs = with_draft(folder, knobs)
    whole = gained(folder, knobs, greedy)
    assert whole > 0
    assert gained(folder, {**knobs, "draft_vocabulary": str(path)}, greedy) == whole
    assert gained(folder, {**knobs, "draft_vocabulary": VOCAB}, greedy) == whole


@pytest.mark.parametrize(
    ("suffix", "knobs"),
    [(".json", CHAIN), (".txt", EAGLE), (".npy", STANDALONE)],
    ids=["nextn", "eagle", "standalone"],
)
def test_only_tokens_of_the_file_are_drafted(
    folder: Path, plain: LLM, suffix: str, knobs: dict[str, Any], tmp_path: Path
) -> None:
    kept = [2, 5, 7, 11]
    path = tmp_path / f"ids{suffix}"
    if suffix == ".npy":
        np.save(path, np.array(kept))
    else:
        path.write_text(json.dumps(kept) if suffix == ".json" else " ".join(map(str, kept)))
    knobs = {**with_draft(folder, knobs), "draft_vocabulary": str(path)}
    with engine(folder, 0, speculative=knobs) as llm:
        same(llm.generate(prompts(), features()), plain.generate(prompts(), features()))
        drafts: list[int] = []
        algorithm = algorithm_of(llm)
        draft = algorithm.draft

        def watched(batch: Any) -> Any:
            found = draft(batch)
            drafts.extend(found[:, 1:].flatten().tolist())
            return found

        algorithm.draft = watched
        llm.generate(prompts(), GREEDY)
        assert drafts and set(drafts) <= set(kept)


def test_counted_tokens_follow_the_text(
    folder: Path, greedy: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while the drafts choose from the tokens that were most frequent."""
    monkeypatch.setattr(frequent_tokens, "REFRESH_STEPS", 4)
    with engine(folder, 0, speculative={**CHAIN, "draft_vocabulary": 5}) as llm:
        frequent = algorithm_of(llm)._frequent
        before = frequent._counts[:VOCAB].numpy().copy()  # of the self-test
        found = llm.generate(prompts(), GREEDY)
        same(found, greedy)
        counts = np.zeros(VOCAB, np.int64)
        for ids, one in zip(prompts(), found, strict=True):
            np.add.at(counts, ids, 1)
            np.add.at(counts, one.token_ids, 1)
        counted = frequent._counts[:VOCAB].numpy()
        more = counted - before - counts
        assert 0 <= more.min() and more.sum() <= 4 * len(found), "drafts behind the ends count, too"
        frequent._choose()
        assert set(frequent.head.ids.tolist()) == set(np.argsort(-counted, kind="stable")[:5])


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)


@pytest.mark.parametrize("vocabulary", [5, "file"])
@pytest.mark.parametrize("parallel", [2, 4])
def test_ranks_with_slices_of_the_head_agree(
    folder: Path,
    plugins: PluginSet,
    vocabulary: Any,
    parallel: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices have different numbers of the file's tokens, and graphs replay the drafts."""
    monkeypatch.setattr(frequent_tokens, "REFRESH_STEPS", 4)
    if vocabulary == "file":
        (tmp_path / "ids.json").write_text("[0, 1, 2, 3, 4, 11]")
        vocabulary = str(tmp_path / "ids.json")
    asked = [submit(number, ids, 12) for number, ids in enumerate(prompts()[:5])]

    def tokens(speculative: dict[str, Any], ranks: int) -> dict[int, list[int]]:
        config = {
            "model": str(folder),
            **BASE,
            "graphs": {"use": "replaying", "batch_sizes": [1, 2, 4, 6]},
            "scheduler": {"overlap": False, "max_running_requests": 6},
            "speculative": speculative,
        }
        if ranks > 1:
            config["parallel"] = [{"use": "tensor", "size": ranks}]
        with RankSet(rank_plan(config, plugins), plugins) as found:
            return {id: one.tokens for id, one in found.run(asked).items()}

    want = tokens(CHAIN, 1)
    assert tokens({**CHAIN, "draft_vocabulary": vocabulary}, parallel) == want
    assert tokens({**TREE, "draft_vocabulary": vocabulary}, parallel) == want


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1, 2, 12]", "has the id 12; the model's ids end at 11"),
        ("[1, -1]", "has the id -1"),
        ("[1, 1]", "an id twice"),
        ("[]", "has 0 ids"),
        ("{}", "not a list of token ids"),
        ("[1", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    folder: Path, content: str | None, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PlanRefused) as refused:
        engine(folder, 0, speculative={**CHAIN, "draft_vocabulary": str(path)})
    (refusal,) = refused.value.refusals
    assert refusal.field == "speculative.draft_vocabulary"
    assert part in refusal.reason and refusal.fix


@pytest.mark.parametrize("count", [0, 13, "32k.pt"])
def test_a_number_or_format_that_does_not_fit_is_refused(folder: Path, count: Any) -> None:
    with pytest.raises(PlanRefused) as refused:
        engine(folder, 0, speculative={**CHAIN, "draft_vocabulary": count})
    assert [one.field for one in refused.value.refusals] == ["speculative.draft_vocabulary"]


def test_the_plan_has_a_line_for_the_rows(folder: Path) -> None:
    """They are as long as the hidden states of the model with the drafts' head."""
    narrow = write_config(
        folder.parent / "narrow", "llama", vocab_size=VOCAB, hidden_size=32, num_attention_heads=2
    )
    for knobs in (CHAIN, {**STANDALONE, "draft_model": str(narrow)}):
        with engine(folder, 0, speculative={**knobs, "draft_vocabulary": 5}) as llm:
            model = llm.plan.facts.draft or llm.plan.facts.model
            lines = {line.name: line.bytes for line in llm.plan.budget}
            assert lines["draft head"] == 5 * model.hidden_size * 4
            assert algorithm_of(llm)._frequent.head._rows.shape == (5, model.hidden_size)


def algorithm_of(llm: LLM) -> Any:
    executor: Any = llm._executor
    return executor._engine.runner.speculative


@pytest.mark.parametrize("use", ["ngram", "none"])
def test_an_algorithm_without_a_head_refuses_it_with_a_fix_that_works(
    folder: Path, use: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        engine(folder, 0, speculative={"use": use, "draft_vocabulary": 5})
    (refusal,) = refused.value.refusals
    assert refusal.field == "speculative.draft_vocabulary"
    assert refusal.fix.endswith("or leave it out")


def test_a_head_with_a_vocabulary_of_its_own_refuses_another(folder: Path) -> None:
    head = write_random_head(folder)
    config = json.loads((head / "config.json").read_text()) | {"draft_vocab_size": 9}
    own = head.parent / "reduced"
    own.mkdir(exist_ok=True)
    (own / "config.json").write_text(json.dumps(config))
    knobs = {**EAGLE, "draft_model": str(own)}
    with pytest.raises(PlanRefused) as refused:
        engine(folder, 0, speculative={**knobs, "draft_vocabulary": 5})
    (refusal,) = refused.value.refusals
    assert refusal.field == "speculative.draft_vocabulary" and refusal.fix == "leave it out"
    assert "9 of 12 tokens" in refusal.reason


def test_sampled_requests_keep_their_tokens(folder: Path, plain: LLM) -> None:
    draws = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(12)]
    with engine(folder, 0, speculative={**TREE, "draft_vocabulary": 4}) as llm:
        same(llm.generate(prompts(), draws), plain.generate(prompts(), draws))
    assert torch.is_inference_mode_enabled() is False
