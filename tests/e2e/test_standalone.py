"""A whole model as a draft changes only the speed of tokens, and drafts what it generates alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glowplug import LLM, SamplingParams
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from glowplug.entrypoints.front.llm import Completion
from tests.e2e.cuts import CUTS
from tests.models.test_parity_deepseek import V3
from tests.plugins import accepting, replaying_runtime
from tests.support.combinations import Combination, Reference as OneRank, plugins, reference, run
from tests.support.draft_requests import (
    GREEDY,
    MANY_ROWS,
    VOCAB,
    all_pages_are_back,
    around_pages,
    context_ends_alike,
    features,
    follows_distribution,
    limits_are_exact,
    prompts,
    same,
)
from tests.support.layouts import layout
from tests.support.parity import COMMON, Reference, write
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import write_config

STEPS = 3
SHAPES = {
    "llama": (
        "LlamaForCausalLM",
        dict(COMMON, num_hidden_layers=2, num_key_value_heads=2, head_dim=16),
    ),
    "deepseek": ("DeepseekV3ForCausalLM", dict(V3, num_hidden_layers=2)),
}
#: name -> kinds of the target and of the draft, and sizes of the draft
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8}),
    "deepseek-llama": ("deepseek", "llama", {"num_attention_heads": 2, "head_dim": 32}),
    "llama-deepseek": ("llama", "deepseek", {"num_hidden_layers": 2}),
    "deepseek": ("deepseek", "deepseek", {}),
}


@dataclass
class Model:
    """The folders of a target and of its draft, and the draft in transformers."""

    target: Path
    draft: Path
    reference: Reference


def make_model(folder: Path, form: str) -> Model:
    kind, draft_kind, sizes = FORMS[form]
    name, shape = SHAPES[kind]
    target = write(folder / "target", name, seed=41, **{**shape, "vocab_size": VOCAB})
    name, shape = SHAPES[draft_kind]
    draft = write(folder / "draft", name, seed=42, **{**shape, "vocab_size": VOCAB, **sizes})
    return Model(target.folder, draft.folder, draft)


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a target and a draft with almost its weights, many of whose drafts are right."""
    made = make_model(tmp_path_factory.mktemp("near"), "deepseek")
    generator = torch.Generator().manual_seed(3)
    for file in made.target.glob("*.safetensors"):
        tensors = {
            name: t + 0.1 * t.std(correction=0) * torch.randn(t.shape, generator=generator)
            for name, t in load_file(file).items()
        }
        save_file(tensors, made.draft / file.name)
    shutil.copy(made.target / "config.json", made.draft / "config.json")
    return made


def configured(target: Path, draft: Path | None, **config: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": str(target),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
    }
    if draft is not None:
        own = {"use": "standalone", "adaptive": False, "steps": STEPS, "draft_model": str(draft)}
        base["speculative"] = {**own, **config.pop("speculative", {})}
    return {**base, **config}


def engine(target: Path, draft: Path | None, **config: Any) -> LLM:
    loaded = ["tests.plugins.accepting", "tests.plugins.replaying"]
    return LLM(plugins=loaded, **configured(target, draft, **config))


# ---- the same tokens -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(model: Model) -> Iterator[tuple[list[Completion], list[Completion]]]:
    """Return greedy requests and one for each sampling feature, without speculation."""
    with engine(model.target, None) as llm:
        yield llm.generate(prompts(), GREEDY), llm.generate(prompts(), features())


TREE = {"topk": 3, "draft_tokens": 7}
REPLAYED = {"use": "replaying", "batch_sizes": [1, 2, 4, 8, 16]}
SAME: dict[str, dict[str, Any]] = {
    **{name: CUTS[name] for name in ("batched", "no_overlap", "no_cache", "chunked", "page_1")},
    "two_rows": CUTS["two_rows"],
    "eight_rows": {"scheduler": {"max_running_requests": 8}},
    "one_step": {"speculative": {"steps": 1}},
    "adaptive": {"speculative": {"adaptive": True}},
    "graphs": {"graphs": REPLAYED},
    "tree": {"speculative": TREE},
    "tree_no_cache": {**CUTS["no_cache"], "speculative": TREE},
    "tree_chunked": {**CUTS["chunked"], "speculative": TREE},
    "tree_page_1": {**CUTS["page_1"], "speculative": {"steps": 2, "topk": 4, "draft_tokens": 4}},
    "tree_graphs": {"graphs": REPLAYED, "speculative": {**TREE, "steps": 2}},
}


PAIRS = [
    (form, variant)
    for place, variant in enumerate(SAME)
    for number, form in enumerate(FORMS)
    if (place + number) % 2 == 0
]


#: by default each variant runs with one form, and each form with several variants
SLOW_PAIRS = [
    (form, variant)
    for place, variant in enumerate(SAME)
    for number, form in enumerate(FORMS)
    if (place + number) % 4 == 2
]


@pytest.mark.parametrize(
    ("model", "variant"), some_slow_rows(PAIRS, SLOW_PAIRS), indirect=["model"]
)
def test_the_same_tokens_as_without_speculation(
    model: Model, plain: tuple[list[Completion], list[Completion]], variant: str
) -> None:
    with engine(model.target, model.draft, **SAME[variant]) as llm:
        same(llm.generate(prompts(), GREEDY), plain[0])
        same(llm.generate(prompts(), features()), plain[1])  # now with a warm cache
        stats = llm.stats
        all_pages_are_back(llm)
        assert llm.plan.sizes.draft_shape.is_tree == variant.startswith("tree")
    if variant != "adaptive":  # wrong drafts are soon no longer made
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


LONG = [params.replace(max_tokens=44, min_tokens=0) for params in features()]


@pytest.fixture(scope="module")
def long_answers(near: Model) -> list[Completion]:
    with engine(near.target, None) as llm:
        return llm.generate(prompts(), LONG)


@pytest.mark.parametrize(
    ("overlap", "shape"),
    [
        pytest.param(False, {}, id="in_turn-chain"),
        pytest.param(False, TREE, id="in_turn-tree", marks=pytest.mark.slow),
        pytest.param(True, {}, id="overlap-chain", marks=pytest.mark.slow),
        pytest.param(True, TREE, id="overlap-tree"),
    ],
)
def test_preempted_requests_keep_their_tokens(
    near: Model, long_answers: list[Completion], shape: dict[str, int], overlap: bool
) -> None:
    small: dict[str, Any] = {
        "context_length": 200,
        "memory": {"kv_tokens": 256},
        "scheduler": {"overlap": overlap},
    }
    with engine(near.target, near.draft, speculative=shape, **small) as llm:
        same(llm.generate(prompts(), LONG), long_answers)
        assert llm.stats.preemptions > 0
        all_pages_are_back(llm)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return reference(tmp_path_factory.mktemp("reference") / "target")


CELLS = [
    (topk, one)
    for one in (
        Combination(),
        Combination(tp=2),
        Combination(tp=2, radix=False, overlap=False),
        Combination(tp=2, chunked=True),
    )
    for topk in (1, 3)
]


@pytest.mark.parametrize(
    ("topk", "one"),
    some_slow_rows(
        CELLS,
        [(3, Combination()), (1, Combination(tp=2)), (3, Combination(tp=2, chunked=True))],
    ),
    ids=lambda part: part.name if isinstance(part, Combination) else f"topk {part}",
)
def test_ranks_yield_the_tokens_of_one_rank(
    known: OneRank, tmp_path: Path, one: Combination, topk: int
) -> None:
    """Requests share prefixes, are preempted, chunked and aborted on ranks that split the draft."""
    draft = write_config(tmp_path / "draft", "llama", vocab_size=158)
    speculative = {"use": "standalone", "adaptive": False, "steps": 2, "topk": topk}
    run(one, known, speculative={**speculative, "draft_model": str(draft)})


def test_every_limit_is_exact(near: Model) -> None:
    """Requests end by max_tokens, eos, stop tokens and the context's end as without drafts."""
    with engine(near.target, near.draft) as llm, engine(near.target, None) as plain:
        limits_are_exact(llm, plain)
    short = {"context_length": 72}
    for shape in ({}, TREE):
        with (
            engine(near.target, near.draft, speculative=shape, **short) as llm,
            engine(near.target, None, **short) as plain,
        ):
            context_ends_alike(llm, plain)


@pytest.mark.parametrize("knobs", [{"steps": 2}, {"steps": 2, "topk": 3}], ids=["chain", "tree"])
def test_verified_tokens_follow_the_targets_distribution(
    near: Model, knobs: dict[str, int]
) -> None:
    with (
        engine(near.target, near.draft, speculative=knobs, scheduler=MANY_ROWS) as llm,
        engine(near.target, None, scheduler=MANY_ROWS) as plain,
    ):
        follows_distribution(llm, plain)


def test_ranks_of_their_own_processes(near: Model) -> None:
    """A rank's process builds the draft from the plan that it receives."""
    with engine(near.target, None) as plain:
        want = plain.generate(prompts()[:4], GREEDY)
    with engine(near.target, near.draft, executor={"use": "multiprocess"}) as llm:
        same(llm.generate(prompts()[:4], GREEDY), want)
        assert llm.stats.accepted_tokens > 0


# ---- what is drafted -----------------------------------------------------------------------------


def gains(model: Reference, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the tokens that an answer gains in each step, by the draft model in transformers."""
    found = []
    at = 1  # the prompt's step yields one token
    while at < len(answer):
        drafts = model.greedy(prompt + answer[:at], STEPS)
        count = 1
        for draft, token in zip(drafts, answer[at:], strict=False):
            if draft != token:
                break
            count += 1
        found.append(count)
        at += count
    return found


def test_drafts_are_those_of_the_model_alone(model: Model) -> None:
    """Each step gains what the draft model's own greedy tokens gain."""
    wanted = []
    accepting.take()
    with engine(model.target, model.draft) as llm:
        for prompt in prompts()[::3]:
            (one,) = llm.generate([prompt], GREEDY)
            wanted.append(gains(model.reference, prompt, one.token_ids))
    found = [counts[1:] for counts in accepting.take()]
    for got, want in zip(found, wanted, strict=True):
        assert got[:-1] == want[:-1], "the last step may be cut off by max_tokens"
    assert any(count > 1 for counts in wanted for count in counts)


COMPANY: dict[str, dict[str, Any]] = {
    **{name: CUTS[name] for name in ("batched", "no_overlap", "chunked", "chunked_one", "page_1")},
    "graphs": {"graphs": REPLAYED},
    "pieces": {"graphs": {**REPLAYED, "prefill": True, "prefill_tokens": [4, 8, 16, 32, 64]}},
}


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_a_request_gains_the_same_in_any_company(near: Model, shape: dict[str, int]) -> None:
    """Accept lengths are equal alone and batched, eager and replayed, with and without a cached
    prefix, in chunks, and with overlapped steps or without.
    """
    some = around_pages(prompts())
    accepting.take()
    drafts: dict[str, Any] = {"speculative": shape}
    alone_in = {"cache": {"use": "none"}, "scheduler": {"overlap": False}}
    with engine(near.target, near.draft, **alone_in, **drafts) as llm:
        for ids in some:
            llm.generate([ids], GREEDY)
        alone = accepting.take()
    gained = [count for row in alone for count in row[1:]]
    assert 1.3 < sum(gained) / len(gained) < STEPS + 1, "many drafts are right, and some are not"
    for name, config in COMPANY.items():
        replaying_runtime.NEWEST.clear()
        with engine(near.target, near.draft, **config, **drafts) as llm:
            llm.generate(some, GREEDY)
            assert accepting.take() == alone, name
            warm = llm.generate(some, GREEDY)
            assert sum(one.cached_tokens for one in warm) > 0
            assert accepting.take() == alone, f"{name}, with a warm cache"
        if "graphs" in config:
            assert replaying_runtime.NEWEST[0].filled, "steps are replayed"


def test_a_cached_answer_holds_the_entries_of_its_last_drafts(near: Model) -> None:
    """A conversation that continues behind its own answer drafts what a fresh engine drafts.

    Pages of answers hold entries of tokens that were drafted and accepted in the last step.
    """
    one_page = {"attention": {"page_size": 1}}
    params = GREEDY.replace(max_tokens=12)
    accepting.take()
    for shape in ({}, TREE):
        with engine(near.target, near.draft, speculative=shape, **one_page) as llm:
            said = [prompt[:9] for prompt in prompts()]
            found = []
            for _ in range(3):
                answers = llm.generate(said, params)
                found.append(accepting.take())
                said = [ids + one.token_ids for ids, one in zip(said, answers, strict=True)]
            assert sum(one.cached_tokens for one in answers) > 20 * len(said)
        with engine(near.target, near.draft, speculative=shape, cache={"use": "none"}) as llm:
            said = [prompt[:9] for prompt in prompts()]
            for counts in found:
                answers = llm.generate(said, params)
                assert accepting.take() == counts
                said = [ids + one.token_ids for ids, one in zip(said, answers, strict=True)]


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_ranks_gain_the_same(near: Model, shape: dict[str, int]) -> None:
    """A draft split over two ranks has the accept lengths of one rank."""
    config = configured(near.target, near.draft, context_length=128, speculative=shape)
    found = {}
    for name, size in (("one", 1), ("tp2", 2)):
        more = {"parallel": layout(size)} if size > 1 else {}
        with RankSet(rank_plan({**config, **more}, plugins()), plugins()) as ranks:
            ranks.run([submit(i, prompt, 12) for i, prompt in enumerate(prompts()[:6])])
            ranks.check_idle()
            found[name] = [(ranks.collected[i].tokens, ranks.collected[i].counts) for i in range(6)]
    assert found["tp2"] == found["one"]
    assert any(count > 1 for _, counts in found["one"] for count in counts[1:])


# ---- the embedded model --------------------------------------------------------------------------

QUESTIONS = ("What is 27 + 15?", "Sort these numbers: 41, 7, 93", "Who are you?")


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_the_model_as_its_own_draft_accepts_everything(shape: dict[str, int]) -> None:
    """Every step of a chain gains all drafts and one token.

    A tree prefers likely siblings to the deepest draft of its best branch, so some steps gain less.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1 + 6 * (STEPS + 1), ignore_eos=True)
    accepting.take()
    speculative = {"use": "standalone", "draft_model": "embedded", "adaptive": False, **shape}
    with LLM(model="embedded", plugins=["tests.plugins.accepting"], speculative=speculative) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(chats, params)
    with LLM(model="embedded") as llm:
        assert [one.token_ids for one in llm.chat(chats, params)] == [
            one.token_ids for one in answers
        ]
    gained = [count for counts in accepting.take() for count in counts[1:]]
    if not shape:
        assert gained == [STEPS + 1] * 6 * len(QUESTIONS)
    assert sum(gained) / len(gained) > 0.85 * (STEPS + 1)


def test_measured_memory_of_the_draft() -> None:
    """The planned lines of the draft are those that the ranks report."""
    speculative = {"use": "standalone", "draft_model": "embedded"}
    with LLM(model="embedded", speculative=speculative, context_length=256) as llm:
        lines = {line.name: line.bytes for line in llm.plan.budget}
        algorithm: Any = llm._executor._engine.runner.speculative  # type: ignore[attr-defined]
        assert algorithm._own_cache._pool.bytes == lines["draft kv cache"] == lines["kv cache"]
    plain = make_plan({"model": "embedded"})
    assert "draft kv cache" not in {line.name for line in plain.budget}
