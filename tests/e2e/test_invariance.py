"""Greedy tokens and logits are the same, however the work is split: batch, chunks, cache,
overlap, preemption.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.entrypoints.front.llm import Completion
from tests.e2e.cuts import CUTS
from tests.support.slow_cases import some_slow, some_slow_rows
from tests.support.tiny import VOCAB, write_config

PROMPTS = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, ignore_eos=True)
#: enough tokens to begin a page, and too few to be preempted
SHORT = PARAMS.replace(max_tokens=12)
TOLERANCE = 1e-5


def prompts() -> list[list[int]]:
    """Return prompts of uneven lengths around page and chunk borders, with shared prefixes for the
    cache.
    """
    rng = np.random.default_rng(11)
    shared = rng.integers(2, VOCAB, 40).tolist()
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 90]
    return [(shared[: min(40, n // 2)] + rng.integers(2, VOCAB, n).tolist())[:n] for n in lengths]


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
    }
    if "fp8" in folder.name:
        # NOTE: rounding activations to FP8 turns a last-bit difference of float32 sums into a whole
        # FP8 step, so only the weights are FP8 here; the activations' own error is bounded in
        # tests/kernels.
        base["quantization"] = {"use": "block_fp8", "activations": "none"}
    for key, value in config.items():
        base[key] = (
            {**base[key], **value}
            if isinstance(base.get(key), dict) and isinstance(value, dict)
            else value
        )
    return LLM(model=str(folder), **base)


def same(got: list[Completion], want: list[Completion], count: int = SHORT.max_tokens or 0) -> None:
    """Check ``count`` tokens of each completion against the first ones of ``want``."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.token_ids == b.token_ids[:count], f"prompt {i}: tokens differ"
        assert a.logprobs is not None and b.logprobs is not None
        known = b.logprobs.token[:count]
        worst = max(abs(x - y) for x, y in zip(a.logprobs.token, known, strict=True))
        assert worst < TOLERANCE and math.isfinite(worst), (
            f"prompt {i}: log-probabilities differ by {worst}"
        )


MODELS = ("v3", "v2", "llama", "v3_fp8")


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    return write_config(folder, request.param, num_hidden_layers=2)


@pytest.fixture(scope="module")
def references() -> dict[str, list[Completion]]:
    """The completions of ``alone`` by model: pytest builds ``alone`` again at each change of the
    model.
    """
    return {}


@pytest.fixture(scope="module")
def alone(folder: Path, references: dict[str, list[Completion]]) -> list[Completion]:
    """The reference: one request at a time, whole prompts, no cache, no overlap, un-absorbed where
    that exists.
    """
    if folder.name not in references:
        references[folder.name] = one_by_one(folder)
    return references[folder.name]


def one_by_one(folder: Path) -> list[Completion]:
    naive: dict[str, Any] = (
        {} if "llama" in folder.name else {"attention": {"use": "torch_mla", "absorb": False}}
    )
    with engine(folder, cache={"use": "none"}, scheduler={"overlap": False}, **naive) as llm:
        return [llm.generate([ids], PARAMS)[0] for ids in prompts()]


VARIANTS: dict[str, dict[str, Any]] = {
    **CUTS,
    "preempted": {"memory": {"kv_tokens": 288}},
    "preempted_no_overlap": {"memory": {"kv_tokens": 288}, "scheduler": {"overlap": False}},
    "preempted_chunked": {"memory": {"kv_tokens": 288}, "scheduler": {"chunk_size": 9}},
    "priority": {"policy": {"use": "priority"}},
    "longest_prefix": {"policy": {"use": "longest_prefix"}},
}


#: scheduling is that of the others; these models differ in layers and weights
SLOW = [
    (model, variant)
    for model in ("v2", "v3_fp8")
    for variant in (
        *("no_overlap", "chunked_one", "unmixed", "page_64", "two_rows"),
        *("preempted_no_overlap", "preempted_chunked", "priority", "longest_prefix"),
    )
]


@pytest.mark.parametrize(
    ("folder", "variant"),
    some_slow_rows([(model, variant) for variant in VARIANTS for model in MODELS], SLOW),
    indirect=["folder"],
)
def test_same_tokens_and_logits(folder: Path, alone: list[Completion], variant: str) -> None:
    params = PARAMS if variant.startswith("preempted") else SHORT
    with engine(folder, **VARIANTS[variant]) as llm:
        first = llm.generate(prompts(), params)
        again = llm.generate(prompts()[::-1], params)[::-1]  # another order; now with a warm cache
        stats = llm.stats
        llm.control("check")
    for found in (first, again):
        same(found, alone, params.max_tokens or 0)
    if variant.startswith("preempted"):
        assert stats.preemptions > 0, "the pool has to be too small"
    if variant not in ("no_cache",):
        assert sum(c.cached_tokens for c in again) > 0, "the warm cache has to be hit"
    assert stats.pages_free + stats.pages_evictable == stats.pages_total


@pytest.mark.parametrize("folder", ["v3", "v2", "v3_fp8"], indirect=True)
def test_absorbed_and_plain_attention_agree(folder: Path, alone: list[Completion]) -> None:
    for absorb in (True, False):
        with engine(folder, attention={"use": "torch_mla", "absorb": absorb}) as llm:
            same(llm.generate(prompts(), SHORT), alone)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_every_batch_size_gives_the_same_tokens(
    folder: Path, alone: list[Completion], size: int
) -> None:
    """Copies of one prompt run beside others: every copy gives the reference's tokens."""
    many = (prompts() * 3)[:size]
    want = (alone * 3)[:size]
    with engine(folder, scheduler={"max_running_requests": size}) as llm:
        same(llm.generate(many, SHORT), want)


#: a rank in a process of its own builds any model in the same way
@pytest.mark.parametrize("folder", some_slow(MODELS, MODELS[1:]), indirect=True)
def test_multiprocess_gives_the_same(folder: Path, alone: list[Completion]) -> None:
    with engine(folder, executor={"use": "multiprocess"}) as llm:
        same(llm.generate(prompts(), SHORT), alone)


SEEDED = {
    "plain": SamplingParams(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True),
    "everything": SamplingParams(
        temperature=1.2,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        seed=7,
        max_tokens=16,
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
    ),
}


#: samplers read logits, whose invariance the other tests check with every model
@pytest.mark.parametrize(
    ("folder", "kind"),
    some_slow_rows(
        [(model, kind) for model in MODELS for kind in SEEDED],
        [("v2", "plain"), ("v2", "everything"), ("llama", "plain"), ("v3_fp8", "everything")],
    ),
    indirect=["folder"],
)
def test_seeded_sampling_is_as_invariant(folder: Path, kind: str) -> None:
    params = SEEDED[kind]
    with engine(folder, cache={"use": "none"}, scheduler={"overlap": False}) as llm:
        want = [llm.generate([ids], params)[0].token_ids for ids in prompts()]
    for config in ({}, {"memory": {"kv_tokens": 288}}, {"scheduler": {"chunk_size": 5}}):
        with engine(folder, **config) as llm:
            assert [c.token_ids for c in llm.generate(prompts(), params)] == want
