"""The sample model family of a third party: Qwen2, Qwen3 and Qwen3-MoE, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from glowplug import LLM, SamplingParams
from glowplug.core.api import ModelFacts, PlanRefused
from glowplug.core.facts.model_folder import read_folder
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.model_reading import architecture_rules
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import ModelFamily, Worker
from glowplug.core.step.messages import Submit, packed_ids
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, run_ranks
from glowplug.core.testing.suites.models import ModelSuite
from tests.plan.test_rank_bytes import held_bytes
from tests.support.parity import COMMON, Reference, write
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    lines_of,
    private_imports,
)

NAME = "glowplug-qwen"
PLUGIN = ["glowplug_qwen.plugin"]
SMALL: dict[str, Any] = dict(COMMON, num_key_value_heads=2, num_hidden_layers=2)
MOE: dict[str, Any] = dict(
    SMALL,
    head_dim=16,
    num_hidden_layers=3,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    mlp_only_layers=[1],
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", SMALL),
    "qwen2_tied_yarn": (
        "Qwen2ForCausalLM",
        dict(SMALL, tie_word_embeddings=True, rope_parameters=YARN),
    ),
    "qwen3": ("Qwen3ForCausalLM", dict(SMALL, head_dim=32, rms_norm_eps=0.1)),
    "qwen3_biases": ("Qwen3ForCausalLM", dict(SMALL, head_dim=16, attention_bias=True)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", dict(MOE, norm_topk_prob=True)),
    "qwen3_moe_plain_weights": ("Qwen3MoeForCausalLM", dict(MOE, decoder_sparse_step=3)),
}
CONFIG: dict[str, Any] = {
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 128,
    "memory": {"kv_tokens": 512},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [2, 3, 4, 5, 9, 17]


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the name of a case to its checkpoint, which is written once."""

    @cache
    def get(case: str) -> Reference:
        architecture, config = CASES[case]
        return write(tmp_path_factory.mktemp(case), architecture, seed=len(case), **config)

    return get


def facts_of(folder: Path) -> ModelFacts:
    plugins = load_plugins(PLUGIN, entry_points=False)
    found = read_folder(folder, architecture_rules(plugins.components("model")))
    assert found is not None
    return found


class Family(ModelSuite):
    """The suite on the checkpoint of one case."""

    case = ""

    @pytest.fixture(autouse=True)
    def _saved(self, saved: Any) -> None:
        self._reference: Reference = saved(self.case)
        self._facts = facts_of(self._reference.folder)
        self._tensors = self._reference.tensors()

    def make(self, plan: EnginePlan, worker: Worker) -> ModelFamily:
        from glowplug_qwen.family import QwenFamily
        from glowplug_qwen.plugin import QwenOptions

        return QwenFamily(QwenOptions(), plan, worker)

    def facts(self) -> ModelFacts:
        return self._facts

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def reference(self, tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        return self._reference.logits(ids)


class TestQwen2(Family):
    case = "qwen2"


class TestQwen2TiedYarn(Family):
    case = "qwen2_tied_yarn"


class TestQwen3(Family):
    case = "qwen3"


class TestQwen3Biases(Family):
    case = "qwen3_biases"


class TestQwen3Moe(Family):
    case = "qwen3_moe"


class TestQwen3MoePlainWeights(Family):
    case = "qwen3_moe_plain_weights"


def engine(folder: Path, **config: Any) -> LLM:
    return LLM(model=str(folder), plugins=PLUGIN, **{**CONFIG, **config})


@pytest.mark.parametrize("case", ["qwen2", "qwen3_biases", "qwen3_moe"])
def test_the_engine_generates_the_references_tokens(case: str, saved: Any) -> None:
    reference = saved(case)
    with engine(reference.folder) as llm:
        (answer,) = llm.generate([PROMPT], GREEDY)
    assert answer.token_ids == reference.greedy(PROMPT, 8)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_bytes_of_every_tensor(case: str, saved: Any, tmp_path: Path) -> None:
    """The declared tensors alone and those of the checkpoint have the bytes of the model."""
    folder = saved(case).folder
    plugins = load_plugins([THREADS, *PLUGIN], entry_points=False)
    plan = rank_plan({**CONFIG, "model": str(folder)}, plugins)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = {**CONFIG, "model": str(tmp_path), "weights": {"use": "random"}}
    declared = rank_plan(config, plugins)
    with RankSet(plan, plugins) as ranks:
        held = held_bytes(ranks.engines[0].runner.model)
    for one in (plan, declared):
        assert next(line.bytes for line in one.budget if line.name == "weights") == held


@pytest.mark.parametrize("case", ["qwen2", "qwen3_biases", "qwen3_moe"])
def test_two_ranks_generate_the_references_tokens(case: str, saved: Any) -> None:
    reference = saved(case)
    plugins = load_plugins([THREADS, *PLUGIN], entry_points=False)
    config = {**CONFIG, "model": str(reference.folder), "parallel": [{"use": "tensor", "size": 2}]}
    answers = run_ranks(config, [Submit(1, packed_ids(PROMPT), GREEDY)], plugins)
    assert answers[1].tokens == reference.greedy(PROMPT, 8)


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_scaling 'longrope'"),
        ("qwen3", {"intermediate_size": None}, "no intermediate_size"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "no num_experts_per_tok"),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": None}, "no n_routed_experts"),
    ],
)
def test_unsupported_configurations_are_refused(
    case: str, changes: dict[str, Any], reason: str, saved: Any, tmp_path: Path
) -> None:
    config = json.loads((saved(case).folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanRefused) as caught:
        engine(tmp_path, weights={"use": "random"})
    assert any(reason in one.reason and one.by == "qwen" for one in caught.value.refusals)


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES
