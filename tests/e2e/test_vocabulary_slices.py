"""Ranks that divide the vocabulary choose one rank's tokens, and exchange logits only if needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.layers.embedding import LmHead
from glowplug.core.layers.step_logits import states
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import Shard, VocabularySlices
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.plugins.sampling.torch_sampler_runtime import TorchSampler
from glowplug.plugins.speculative.none_runtime import NoSpeculation
from tests.support.layouts import Layout, layout
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import write_config

VOCAB = 158  #: the last of four slices is shorter than the others
LAYOUTS: dict[str, Layout] = {
    "tp 2": layout(2),
    "tp 4": layout(4),
    "tp 4, dp 2": layout(4, dp=2),
    "tp 4, ep 2, dp 2": layout(4, 2, 2),
}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"use": "nextn", "adaptive": False, "steps": 2, "topk": 1},
    "tree": {"use": "nextn", "adaptive": False, "steps": 2, "topk": 3},
    "few tokens": {
        "use": "nextn",
        "adaptive": False,
        "steps": 2,
        "topk": 1,
        "draft_vocabulary": 21,
    },
    "ngram": {"use": "ngram"},
}
PROMPTS = {1: [5, 6, 7], 2: [9], 3: [4, 8, 15, 16, 23, 42, 7], 4: [11, 12], 5: [3, 1, 4, 1, 5]}
#: parameters of requests that need all logits
EVERYTHING: dict[int, dict[str, Any]] = {
    1: {"temperature": 1.0},
    2: {"temperature": 0.8, "top_k": 5},
    3: {"logprobs": 2},
    4: {"presence_penalty": 0.5},
    5: {"temperature": 1.2, "top_p": 0.7},
}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of every gather of logits."""
    rows: list[int] = []
    gather = VocabularySlices.gather

    def spy(self: VocabularySlices, logits: Tensor) -> Tensor:
        rows.append(len(logits))
        return gather(self, logits)

    monkeypatch.setattr(VocabularySlices, "gather", spy)
    yield rows


def config_of(
    folder: Path, parallel: Layout, drafts: dict[str, Any], graphs: str
) -> dict[str, Any]:
    write_config(folder, "v3", vocab_size=VOCAB, num_hidden_layers=2, num_nextn_predict_layers=1)
    config: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 1024},
        "weights": {"use": "random"},
        "scheduler": {"overlap": False, "max_running_requests": 6, "chunk_size": 16},
        "graphs": {"use": graphs},
    }
    if graphs == "replaying":
        config["graphs"]["batch_sizes"] = [1, 2, 4, 6]
    return {
        **config,
        **({"parallel": parallel} if parallel else {}),
        **({"speculative": drafts} if drafts else {}),
    }


def answers(
    config: dict[str, Any],
    plugins: PluginSet,
    more: dict[int, dict[str, Any]],
    started: Callable[[], None],
) -> dict[int, tuple[list[int], str]]:
    """Return each request's tokens, and how it ended.

    ``started`` is called once the ranks have started.
    """
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        started()
        heard = ranks.run(
            [submit(id, prompt, 10, **more.get(id, {})) for id, prompt in PROMPTS.items()]
        )
        ranks.check_idle()
    ends = {id: one.finished for id, one in heard.items()}
    return {
        id: (list(one.tokens), "" if (end := ends[id]) is None else f"{end.reason} {end.error}")
        for id, one in heard.items()
    }


@pytest.mark.parametrize(
    ("layout", "drafts", "graphs"),
    some_slow_rows(
        [
            *((layout, "chain", "replaying") for layout in LAYOUTS),
            *(("tp 4", drafts, "replaying") for drafts in DRAFTS if drafts != "chain"),
            *(("tp 4", drafts, "eager") for drafts in DRAFTS),
        ],
        # drafts of few tokens are those of a chain, and those of n-grams need no logits
        [
            ("tp 2", "chain", "replaying"),
            *(("tp 4", drafts, "replaying") for drafts in ("few tokens", "ngram")),
            *(("tp 4", drafts, "eager") for drafts in ("chain", "tree")),
        ],
    ),
)
def test_greedy_requests_gather_no_logits(
    layout: str,
    drafts: str,
    graphs: str,
    tmp_path: Path,
    plugins: PluginSet,
    gathered: list[int],
) -> None:
    """Only the passes of a draft that grows trees gather logits, whose sums they need."""
    wanted = answers(config_of(tmp_path, [], DRAFTS[drafts], graphs), plugins, {}, gathered.clear)
    config = config_of(tmp_path, LAYOUTS[layout], DRAFTS[drafts], graphs)
    assert answers(config, plugins, {}, gathered.clear) == wanted
    assert bool(gathered) == (drafts == "tree")


@pytest.mark.parametrize(
    ("layout", "drafts", "graphs"),
    [
        ("tp 4", "none", "eager"),
        ("tp 4", "tree", "replaying"),
        ("tp 4, dp 2", "chain", "replaying"),
    ],
)
def test_other_requests_gather_their_logits(
    layout: str,
    drafts: str,
    graphs: str,
    tmp_path: Path,
    plugins: PluginSet,
    gathered: list[int],
) -> None:
    wanted = answers(
        config_of(tmp_path, [], DRAFTS[drafts], graphs), plugins, EVERYTHING, gathered.clear
    )
    config = config_of(tmp_path, LAYOUTS[layout], DRAFTS[drafts], graphs)
    assert answers(config, plugins, EVERYTHING, gathered.clear) == wanted
    assert gathered


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_end_the_request_as_on_one_rank(
    broken: float,
    tmp_path: Path,
    plugins: PluginSet,
    gathered: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token has a logit that is NaN or infinite, on one rank; minus infinity is no error."""
    place = 100
    compute = LmHead.sliced_logits
    serving = False

    def begin() -> None:
        nonlocal serving
        serving = True
        gathered.clear()

    def damaged(self: LmHead, hidden: Tensor) -> Tensor:
        logits = compute(self, hidden)
        if serving and 0 <= place - self.shard.start < self.shard.size:
            logits[:, place - self.shard.start] = broken
        return logits

    monkeypatch.setattr(LmHead, "sliced_logits", damaged)
    found = []
    for parallel in ([], layout(4)):
        serving = False
        found.append(answers(config_of(tmp_path, parallel, {}, "eager"), plugins, {}, begin))
    assert found[0] == found[1] and not gathered
    assert all(("error" in end) == (broken != float("-inf")) for _, end in found[0].values())


@pytest.mark.parametrize(
    ("kind", "member"), [(TorchSampler, "takes_slices"), (NoSpeculation, "passes_rows")]
)
def test_components_without_the_member_get_all_logits(
    kind: type,
    member: str,
    tmp_path: Path,
    plugins: PluginSet,
    gathered: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = answers(config_of(tmp_path, [], {}, "eager"), plugins, {}, gathered.clear)
    monkeypatch.delattr(kind, member)
    config = config_of(tmp_path, layout(2), {}, "eager")
    assert answers(config, plugins, {}, gathered.clear) == wanted
    assert gathered


def test_a_class_that_overrides_the_method_does_not_inherit_the_claim() -> None:
    class Same(TorchSampler):
        pass

    class Other(TorchSampler):
        def sample(self, *args: Any) -> Any:
            raise NotImplementedError

    class Both(Other):
        takes_slices = TorchSampler.takes_slices

    found = [states(kind.__new__(kind), "takes_slices", "sample") for kind in (Same, Other, Both)]
    assert found == [True, False, True]
    assert not states(object(), "takes_slices", "sample")


def test_grammars_mask_the_slices(gathered: list[int], plugins: PluginSet) -> None:
    """Masks are applied to the slices, so greedy requests with a grammar gather no logits."""
    pytest.importorskip("llguidance")
    config = {
        "model": "embedded",
        "device": "cpu",
        "dtype": "float32",
        "context_length": 128,
        "memory": {"kv_tokens": 1024},
        "scheduler": {"max_running_requests": 4, "chunk_size": 64},
    }
    found = []
    for parallel in ([], layout(2)):
        more = {"parallel": parallel} if parallel else {}
        with RankSet(rank_plan({**config, **more}, plugins), plugins) as ranks:
            gathered.clear()
            heard = ranks.run(
                [
                    submit(1, [5, 6, 7], 24, regex="[0-9]{3}( [a-f]{2}){2,4}", ignore_eos=False),
                    submit(2, [9, 10], 8),
                ]
            )
            found.append({id: list(one.tokens) for id, one in heard.items()})
            assert all(engine.runner.grammars.masks.counts.steps for engine in ranks.engines)
    assert found[0] == found[1] and not gathered


def test_edits_reach_only_the_own_slice() -> None:
    slices = VocabularySlices(Shard(3, 4, 9, parts=3), collectives=None)  # type: ignore[arg-type]
    logits = torch.arange(8.0).view(2, 4)
    added = torch.arange(18.0).view(2, 9) * 100

    slices.edit(logits, lambda whole: whole.add_(added))  # type: ignore[arg-type,return-value]
    assert torch.equal(logits, torch.arange(8.0).view(2, 4) + added[:, 3:7])
