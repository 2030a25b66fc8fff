"""EAGLE heads change only the speed of tokens, and draft what the same heads in plain torch do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from glowplug import LLM, SamplingParams
from glowplug.core.errors import PlanRefused
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from glowplug.entrypoints.front.llm import Completion
from tests.e2e.cuts import CUTS
from tests.models.test_parity_deepseek import V3
from tests.plugins import accepting, replaying_runtime
from tests.support import draft_requests
from tests.support.combinations import plugins
from tests.support.eagle import (
    DEEPSEEK_3,
    LLAMA_1,
    LLAMA_3,
    PlainHead,
    following_target,
    head_config,
    head_tensors,
    teacher,
    write_head,
    write_random_head,
)
from tests.support.parity import COMMON, Reference, write
from tests.support.slow_cases import some_slow

VOCAB = 12  #: so few that a random draft is sometimes right
STEPS = 3
LAYERS = 3
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS}
SHAPES = {
    "llama": dict(COMMON, num_key_value_heads=2, head_dim=16),
    "deepseek": dict(V3),
}
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1": ("llama", LLAMA_1, {}),
    "llama-3": ("llama", LLAMA_3, {"draft_vocab_size": 9}),
    "deepseek-3": ("deepseek", DEEPSEEK_3, {"draft_vocab_size": 9}),
    "deepseek-llama-1": ("deepseek", LLAMA_1, {}),
    "deepseek-llama-3": ("deepseek", LLAMA_3, {"draft_vocab_size": 9}),
}
SLOW = ("deepseek-llama-1",)  #: 40 s; "llama-1" and "deepseek-llama-3" have each of its parts
CLASSES = {"llama": "LlamaForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


@dataclass
class Model:
    """A target's folder with its head's, transformers' model, and the head in plain torch."""

    target: Path
    head: Path
    reference: Reference
    plain: PlainHead


def make_model(folder: Path, form: str) -> Model:
    kind, architecture, changes = FORMS[form]
    shape = {**SHAPES[kind], **SIZES}
    reference = write(folder / "target", CLASSES[kind], seed=43, **shape)
    rope = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "torch_dtype": "float32"}
    config = head_config({"head_dim": 16, **shape}, architecture, **rope, **changes)
    tensors = head_tensors(config)
    weights = reference.tensors()
    plain = PlainHead(
        config, tensors, weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    )
    head = write_head(folder / "head", config, tensors)
    return Model(folder / "target", head, reference, plain)


@pytest.fixture(scope="module", params=some_slow(FORMS, SLOW))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def engine(model: Model, steps: int = STEPS, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
    }
    if steps:
        own = {"use": "eagle", "adaptive": False, "steps": steps, "draft_model": str(model.head)}
        base["speculative"] = {**own, **config.pop("speculative", {})}
    return LLM(
        model=str(model.target),
        plugins=["tests.plugins.accepting", "tests.plugins.replaying"],
        **{**base, **config},
    )


def prompts() -> list[list[int]]:
    """Return prompts of uneven lengths around page and chunk borders, with shared prefixes."""
    rng = np.random.default_rng(11)
    shared = rng.integers(2, VOCAB, 40).tolist()
    lengths = [1, 2, 15, 16, 17, 31, 33, 47, 64, 65]
    return [(shared[: min(40, n // 2)] + rng.integers(2, VOCAB, n).tolist())[:n] for n in lengths]


def sampled() -> list[SamplingParams]:
    kinds = ({}, {"top_k": 3}, {"top_p": 0.6}, {"repetition_penalty": 1.3, "temperature": 0.0})
    return [
        SamplingParams(max_tokens=12, seed=3 + i, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(prompts()))
    ]


def tokens(found: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in found]


@pytest.fixture(scope="module")
def plain(model: Model) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Return the tokens of greedy and of sampled requests without speculation."""
    with engine(model, 0) as llm:
        yield (
            tokens(llm.generate(prompts(), GREEDY)),
            tokens(llm.generate(prompts(), sampled())),
        )


TREE = {"topk": 3, "draft_tokens": 7}
SAME = {
    **{name: CUTS[name] for name in ("batched", "no_overlap", "chunked", "page_1", "two_rows")},
    "tree": {"speculative": TREE},
    "tree_chunked": {**CUTS["chunked"], "speculative": TREE},
    "tree_graphs": {
        "speculative": {**TREE, "steps": 2},
        "graphs": {"use": "replaying", "batch_sizes": [1, 2, 4, 8, 16]},
    },
}


#: forms that run without the variants below; the other form of each family runs in all variants
FEW = ("llama-1", "deepseek-llama-3")
FEWER = ("no_overlap", "page_1", "two_rows")


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        pytest.param(
            form,
            variant,
            marks=pytest.mark.slow if form in SLOW or (form in FEW and variant in FEWER) else (),
        )
        for form in FORMS
        for variant in SAME
    ],
    indirect=["model"],
)
def test_the_same_tokens_as_without_speculation(
    model: Model, plain: tuple[list[list[int]], list[list[int]]], variant: str
) -> None:
    with engine(model, **SAME[variant]) as llm:
        assert tokens(llm.generate(prompts(), GREEDY)) == plain[0]
        assert tokens(llm.generate(prompts(), sampled())) == plain[1], "with a warm cache"
        stats = llm.stats
        pages = llm.control("check")
        assert llm.plan.sizes.draft_shape.is_tree == variant.startswith("tree")
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]


def gains(model: Model, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the tokens that an answer gains in each step, by the head in plain torch."""
    layers = (2, LAYERS // 2, LAYERS - 3)
    found = []
    at = 1  # the prompt's step yields one token
    while at < len(answer):
        known = prompt + answer[:at]
        with torch.no_grad():
            hidden = model.reference.model.model(
                torch.tensor([known[:-1]]), output_hidden_states=True
            ).hidden_states
        features = torch.cat([hidden[layer][0] for layer in layers], -1)
        states = model.plain.states(hidden[-1][0], features)
        drafts = model.plain.chain(states, known[1:], STEPS)
        count = 1
        for draft, token in zip(drafts, answer[at:], strict=False):
            if draft != token:
                break
            count += 1
        found.append(count)
        at += count
    return found


def test_drafts_are_those_of_the_head_in_plain_torch(model: Model) -> None:
    """Requests run alone gain in each step what the plain head's chain gains."""
    wanted = []
    accepting.take()
    with engine(model, cache={"use": "none"}) as llm:
        for prompt in prompts():
            (one,) = llm.generate([prompt], GREEDY)
            wanted.append(gains(model, prompt, one.token_ids))
    found = [counts[1:] for counts in accepting.take()]
    for got, want in zip(found, wanted, strict=True):
        assert got[:-1] == want[:-1], "the last step may be cut off by max_tokens"
    assert any(count > 1 for counts in wanted for count in counts)


REPLAYED = {"use": "replaying", "batch_sizes": [1, 2, 4, 8, 16]}
COMPANY: dict[str, dict[str, Any]] = {
    **{name: CUTS[name] for name in ("batched", "no_overlap", "chunked", "chunked_one", "page_1")},
    "graphs": {"graphs": REPLAYED},
    "pieces": {"graphs": {**REPLAYED, "prefill": True, "prefill_tokens": [4, 8, 16, 32, 64]}},
}


WITH_TREE = ("llama-3", "deepseek-llama-3")


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param(
            form,
            shape,
            id=f"{form}-{'tree' if shape else 'chain'}",
            # each form runs with one of the shapes; 6 to 10 s a test
            marks=pytest.mark.slow if form in SLOW or bool(shape) != (form in WITH_TREE) else (),
        )
        for form in FORMS
        for shape in ({}, TREE)
    ],
    indirect=["model"],
)
def test_a_request_gains_the_same_in_any_company(model: Model, shape: dict[str, int]) -> None:
    """Accept lengths are equal alone and batched, eager and replayed, with and without a cached
    prefix, in chunks, and with overlapped steps or without.
    """
    some = draft_requests.around_pages(prompts())
    accepting.take()
    drafts: dict[str, Any] = {"speculative": shape}
    with engine(model, cache={"use": "none"}, scheduler={"overlap": False}, **drafts) as llm:
        for ids in some:
            llm.generate([ids], GREEDY)
        alone = accepting.take()
    assert any(count > 1 for row in alone for count in row)
    for name, config in COMPANY.items():
        replaying_runtime.NEWEST.clear()
        with engine(model, **config, **drafts) as llm:
            llm.generate(some, GREEDY)
            assert accepting.take() == alone, name
            warm = llm.generate(some, GREEDY)
            assert sum(one.cached_tokens for one in warm) > 0
            assert accepting.take() == alone, f"{name}, with a warm cache"
        if "graphs" in config:
            assert replaying_runtime.NEWEST[0].filled, "steps are replayed"


def drafts(
    llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[list[int]]]:
    """Return the cached tokens of a short answer, and the tokens that each step verifies."""
    executor: Any = llm._executor
    algorithm = executor._engine.runner.speculative
    draft = algorithm.draft
    found: list[list[int]] = []

    def noted(batch: Any) -> torch.Tensor:
        made: torch.Tensor = draft(batch)
        found.extend(made.tolist())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(algorithm, "draft", noted)
        (one,) = llm.generate([prompt], GREEDY.replace(max_tokens=4))
    return one.cached_tokens, found


def test_a_row_behind_a_cached_prefix_drafts_the_same(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prefix of two tokens a third of the head's entries depends on the kept state."""
    rng = np.random.default_rng(2)
    with (
        engine(model, attention={"page_size": 1}) as llm,
        engine(model, attention={"page_size": 1}, cache={"use": "none"}) as fresh,
    ):
        for first, second, third, other in rng.integers(2, VOCAB, (8, 4)).tolist():
            llm.generate([[first, second, third]], GREEDY.replace(max_tokens=1))
            prompt = [first, second, other]
            cached, found = drafts(llm, prompt, monkeypatch)
            assert cached == 2
            assert found and found == drafts(fresh, prompt, monkeypatch)[1]


@pytest.mark.parametrize(
    ("kind", "architecture"),
    list(itertools.product(SHAPES, (LLAMA_3, DEEPSEEK_3))),
)
def test_a_teacher_is_always_accepted(tmp_path: Path, kind: str, architecture: str) -> None:
    """A head that computes the target's own function gains every draft."""
    shape = {**SHAPES[kind], **SIZES, "vocab_size": 40}
    reference = write(tmp_path / "target", CLASSES[kind], seed=43, **shape)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    follower = torch.empty(40, dtype=torch.int64)
    follower[order] = order.roll(-1)
    changed = following_target(reference.tensors(), follower)
    for file in reference.folder.glob("*.safetensors"):
        save_file(changed, file)
    sized = {"head_dim": 16, **shape}
    config = head_config(sized, architecture, rope_theta=10000.0, rms_norm_eps=1e-6)
    head = write_head(tmp_path / "head", config, teacher(config, follower))
    accepting.take()
    whole = GREEDY.replace(max_tokens=1 + 5 * (STEPS + 1))
    with engine(Model(tmp_path / "target", head, reference, None)) as llm:  # type: ignore[arg-type]
        (one,) = llm.generate([[3, 7, 5]], whole)
    expected = [5]
    for _ in one.token_ids:
        expected.append(int(follower[expected[-1]]))
    assert one.token_ids == expected[1:]
    assert accepting.take() == [[1] + [STEPS + 1] * 5]


RANKS = {"tp2": {"tensor": 2}, "dp2": {"tensor": 2, "ep_moe": 2, "dp_attention": 2}}


@pytest.mark.parametrize(
    ("form", "knobs", "layouts"),
    [
        ("deepseek-3", {"steps": 2}, RANKS),
        ("deepseek-3", {"steps": 2, "topk": 3}, RANKS),
        ("deepseek-llama-3", {"steps": 2}, RANKS),
        ("deepseek-llama-3", {"steps": 2, "topk": 3}, RANKS),
        ("llama-1", {"steps": 2, "draft_vocabulary": VOCAB}, ["tp2"]),
        ("llama-3", {"steps": 2, "topk": 3}, ["tp2"]),
    ],
    ids=["chain", "tree", "own cache", "own cache tree", "llama-1", "llama-3 tree"],
)
def test_ranks_gain_the_same(
    tmp_path: Path, form: str, knobs: dict[str, int], layouts: Iterable[str]
) -> None:
    """Split models, and groups of ranks of which some have no work, accept the same drafts."""
    model = make_model(tmp_path, form)
    config: dict[str, Any] = {
        "model": str(model.target),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 1024},
        "scheduler": {"max_running_requests": 8},
        "speculative": {
            "use": "eagle",
            "adaptive": False,
            "draft_model": str(model.head),
            **knobs,
        },
    }
    found = {}
    for name in ("one", *layouts):
        sizes = RANKS.get(name, {})
        parallel = [{"use": use, "size": size} for use, size in sizes.items()]
        more = {"parallel": parallel} if parallel else {}
        with RankSet(rank_plan({**config, **more}, plugins()), plugins()) as ranks:
            ranks.run([submit(i, prompt, 12) for i, prompt in enumerate(prompts()[:5])])
            ranks.check_idle()
            found[name] = [(ranks.collected[i].tokens, ranks.collected[i].counts) for i in range(5)]
    assert all(found[name] == found["one"] for name in layouts)
    assert any(count > 1 for _, counts in found["one"] for count in counts[1:])


def test_drafts_from_a_file_of_all_tokens_are_those_of_the_whole_head(
    model: Model, tmp_path: Path
) -> None:
    """Heads that draft all tokens read the target's head, or rows of it, in the same way."""
    path = tmp_path / "ids.json"
    path.write_text(str(list(range(VOCAB))))
    mapped: dict[str, Any] = {"speculative": {"draft_vocabulary": str(path)}}
    if "draft_vocab_size" in (model.head / "config.json").read_text():
        with pytest.raises(PlanRefused, match="9 of 12 tokens"):
            engine(model, **mapped)
        return
    found = []
    for config in ({}, mapped):
        with engine(model, **config) as llm:
            answers = tokens(llm.generate(prompts(), GREEDY))
            found.append((answers, llm.stats.accepted_tokens, llm.stats.drafted_tokens))
    assert found[0] == found[1] and found[0][1] > 0


@pytest.mark.parametrize("knobs", [{"steps": 2}, {"steps": 2, "topk": 3}], ids=["chain", "tree"])
def test_drawn_tokens_follow_the_targets_distribution(
    folder: Path, plain_v3: LLM, knobs: dict[str, int]
) -> None:
    drafts = {"use": "eagle", "adaptive": False, "draft_model": str(write_random_head(folder))}
    rows = draft_requests.MANY_ROWS
    with draft_requests.engine(folder, 0, speculative={**drafts, **knobs}, scheduler=rows) as llm:
        draft_requests.follows_distribution(llm, plain_v3, 500)


def test_thirty_two_rows_at_a_time(folder: Path, plain_v3: LLM) -> None:
    """Rows of all lengths, with trees of drafts, keep the tokens of an engine without drafts."""
    rng = np.random.default_rng(6)
    many = [rng.integers(2, VOCAB, int(size)).tolist() for size in rng.integers(1, 40, 32)]
    drafts = {"use": "eagle", "adaptive": False, "draft_model": str(write_random_head(folder))}
    drafts |= {"steps": 3, "topk": 3, "draft_tokens": 8}
    rows = {"max_running_requests": 32}
    with draft_requests.engine(folder, 0, speculative=drafts, scheduler=rows) as llm:
        found = llm.generate(many, GREEDY)
        assert llm.stats.accepted_tokens > 0 and llm.stats.steps < 32
        draft_requests.all_pages_are_back(llm)
    assert tokens(found) == tokens(plain_v3.generate(many, GREEDY))


@pytest.fixture(scope="module")
def plain_v3(folder: Path) -> Iterator[LLM]:
    """Return an engine without drafts of the random model in ``folder``."""
    with draft_requests.engine(folder, 0) as llm:
        yield llm
