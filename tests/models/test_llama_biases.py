"""Llama with biases of attention or of feed-forward layers: tokens, bytes and ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from glowplug import SamplingParams
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Submit, packed_ids
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, run_ranks
from tests.plan.test_rank_bytes import compare
from tests.support.parity import COMMON, Reference, write

CASES = {"attention": {"attention_bias": True}, "feed-forward": {"mlp_bias": True}}
#: the names of the checkpoint's biases, each in every layer
BIASES = {
    "attention": {f"self_attn.{part}_proj" for part in "qkvo"},
    "feed-forward": {f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
PROMPT = [2, 3, 4, 5, 9, 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the name of a case to its checkpoint, which is written once."""

    @cache
    def get(case: str) -> Reference:
        config = dict(COMMON, num_key_value_heads=2, head_dim=16, **CASES[case])
        return write(tmp_path_factory.mktemp(case), "LlamaForCausalLM", seed=len(case), **config)

    return get


def config_of(reference: Reference, size: int) -> dict[str, Any]:
    return {
        "model": str(reference.folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 128,
        "memory": {"kv_tokens": 256},
        "parallel": [{"use": "tensor", "size": size}],
    }


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_has_these_biases(case: str, saved: Any) -> None:
    names = [name for name in saved(case).tensors() if name.endswith(".bias")]
    assert {name.removesuffix(".bias").split(".", 3)[3] for name in names} == BIASES[case]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_loaded_bytes(
    case: str, size: int, saved: Any, plugins: PluginSet
) -> None:
    plan = rank_plan(config_of(saved(case), size), plugins)
    with RankSet(plan, plugins) as ranks:
        for rank, engine in enumerate(ranks.engines):
            compare(plan, engine, rank)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_ranks_generate_the_references_tokens(
    case: str, size: int, saved: Any, plugins: PluginSet
) -> None:
    reference = saved(case)
    request = Submit(1, packed_ids(PROMPT), GREEDY)
    answers = run_ranks(config_of(reference, size), [request], plugins)
    assert answers[1].tokens == reference.greedy(PROMPT, 8)
