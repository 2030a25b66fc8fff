"""The sample attention backend of a third party: latent attention in chunks over a KV cache of its
own, with entries that differ between groups of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.api import EnginePlan, PlanRefused, PluginLoadError
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.testing.suites.attention import MlaSuite
from tests.support.tiny import write_config
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    lines_of,
    private_imports,
)

NAME = "glowplug-chunked"
PLUGIN = ["glowplug_chunked.plugin"]
PROMPTS = [list(range(2, 2 + n)) for n in (1, 9, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


class TestChunked(MlaSuite):
    keys = 16
    tree = False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        from glowplug_chunked.plugin import ChunkedOptions
        from glowplug_chunked.runtime import Chunked

        return Chunked(ChunkedOptions(keys=self.keys, exact=99), plan, worker)


class TestOneChunk(TestChunked):
    keys = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("v3"), "v3", num_nextn_predict_layers=1)


def engine(folder: Path, plugins: list[str] = PLUGIN, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 2048},
    }
    return LLM(model=str(folder), plugins=plugins, **{**base, **config})


def answers(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    found = llm.generate(PROMPTS, GREEDY)
    chances = [one.logprobs.token[:1] for one in found if one.logprobs is not None]
    return [list(one.token_ids) for one in found], torch.tensor(chances)


def test_exact_layers_give_the_tokens_of_torch_mla(folder: Path) -> None:
    with engine(folder) as llm:
        want, _ = answers(llm)
    with engine(folder, attention={"use": "chunked", "exact": 3, "keys": 7}) as llm:
        assert answers(llm)[0] == want


def test_rounded_layers_change_little_and_shrink_the_cache_as_planned(folder: Path) -> None:
    found, chances = {}, []
    for exact in (3, 1):
        with engine(folder, attention={"use": "chunked", "exact": exact}) as llm:
            chances.append(answers(llm)[1])
            sizes = llm.plan.sizes
            found[exact] = sizes.kv_bytes / sizes.num_pages / sizes.page_size
            assert llm.control("info")["kv_bytes"] == sizes.kv_bytes
    latent, rope = 32, 8
    assert found == {3: 3 * 4 * (latent + rope), 1: 3 * 4 * rope + 4 * latent + 2 * (latent + 2)}
    assert 0 < (chances[0] - chances[1]).abs().max() < 0.05


def test_the_layers_of_a_draft_need_no_knowledge_of_the_pool(folder: Path) -> None:
    """``EnginePlan.kv_layout`` counts the draft's layer, which the backend never mentions."""
    with engine(folder, attention={"use": "torch_mla"}) as llm:
        want, _ = answers(llm)
    chunked = {"use": "chunked", "exact": 99}
    nextn = {"use": "nextn", "steps": 2, "adaptive": False}
    with engine(folder, attention=chunked, speculative=nextn) as llm:
        assert answers(llm)[0] == want
        assert llm.plan.sizes.draft_layers == 1 and llm.stats.drafted_tokens > 0


# ---- layouts that contradict the plan, and entries of which no cache can be made -----------------


FAULTY = ["tests.plugins.faulty_caches"]


def test_a_layout_that_contradicts_the_plan_stops_the_start(folder: Path) -> None:
    with pytest.raises(PluginLoadError) as caught:
        engine(folder, FAULTY, attention={"use": "larger"})
    said = str(caught.value)
    assert "attention 'larger'" in said and "kv_layout() contradicts the plan" in said
    assert "latent [64] float32" in said and "latent [32] float32" in said
    assert "864 bytes per token" in said and "480 bytes per token" in said
    assert "MiB in all" in said and "fix: " in said


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ("int4", "latent has the unknown dtype 'int4'"),
        ("float23", "latent has the unknown dtype 'float23' (did you mean 'float32'?)"),
        ("float16", "rope is of layer 7 of 3"),
        ("bfloat16", "layer 0 has two entries 'rope'"),
    ],
)
def test_entries_of_which_no_cache_can_be_made_are_refused(
    folder: Path, kept: str, reason: str
) -> None:
    with pytest.raises(PlanRefused) as caught:
        engine(folder, FAULTY, attention={"use": "odd", "kv_dtype": kept})
    refusal = caught.value.refusals[0]
    assert reason in refusal.reason and refusal.fix
    assert all("declares KV entries" in one.reason for one in caught.value.refusals)


def test_a_declaration_that_fails_names_its_plugin(folder: Path) -> None:
    with pytest.raises(PluginLoadError, match=r"faulty_caches.*kv_entries of attention odd failed"):
        engine(folder, FAULTY, attention={"use": "odd", "kv_dtype": "fp8_e5m2"})


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES
