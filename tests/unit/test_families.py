"""The built-in model families: the values of a config.json that they refuse, and the facts they
read.
"""

from __future__ import annotations

from typing import Any

import pytest

from glowplug.core.facts.model_facts import Facts, HardwareFacts, SoftwareFacts
from glowplug.core.facts.model_folder import model_facts, normalise
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.decided import Decided
from glowplug.models.deepseek.config import DeepseekConfig, is_dense
from glowplug.models.families import ModelOptions, register_models
from tests.support.tiny import CONFIGS


def family(architecture: str) -> Component:
    return next(c for c in register_models() if architecture in c.offers.architectures)  # type: ignore[attr-defined]


def refusals(name: str, **changes: Any) -> list[str]:
    model = model_facts(normalise({**CONFIGS[name], **changes}))
    facts = Facts(model, HardwareFacts(), SoftwareFacts())
    context = CheckContext(ModelOptions(), None, facts, chosen={}, values=Decided())  # type: ignore[arg-type]
    check = family(model.architecture).check
    assert check is not None
    found = list(check(context))
    assert all(refusal.fix and refusal.field for refusal in found)
    return [refusal.reason for refusal in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_known_configs_pass(name: str) -> None:
    assert refusals(name) == []


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "'gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        (
            "v3",
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_scaling.original_max_position_embeddings",
        ),
        ("llama", {"intermediate_size": None}, "intermediate_size"),
        ("v3", {"intermediate_size": None}, "intermediate_size"),
        ("v3", {"v_head_dim": None}, "v_head_dim"),
        ("v3", {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ("v3", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("v2", {"topk_method": "expert_choice"}, "'expert_choice'"),
        ("v3", {"n_group": 3}, "8 experts cannot be split into 3 equal groups"),
        ("v3", {"num_experts_per_tok": 5}, "5 experts per token cannot come from 2 groups of 2"),
    ],
)
def test_each_problem_is_one_refusal(name: str, changes: dict[str, Any], reason: str) -> None:
    found = refusals(name, **changes)
    assert len(found) == 1 and reason in found[0]


def test_all_problems_at_once() -> None:
    assert len(refusals("v3", hidden_act="relu", n_group=3, qk_nope_head_dim=None)) == 3


def test_gate_of_each_family() -> None:
    v3 = DeepseekConfig.read(
        model_facts(normalise({k: v for k, v in CONFIGS["v3"].items() if k != "topk_method"}))
    )
    assert (v3.sigmoid, v3.groups, v3.topk_groups, v3.renormalize, v3.scale) == (
        True,
        4,
        2,
        True,
        2.5,
    )
    v2 = DeepseekConfig.read(model_facts(normalise(CONFIGS["v2"])))
    assert (v2.sigmoid, v2.groups, v2.topk_groups, v2.renormalize, v2.q_lora) == (
        False,
        4,
        2,
        False,
        None,
    )
    lite = DeepseekConfig.read(model_facts(normalise({**CONFIGS["v2"], "topk_method": "greedy"})))
    assert (lite.groups, lite.topk_groups) == (1, 1)


def test_dense_layers() -> None:
    def dense(**changes: Any) -> list[int]:
        facts = model_facts(normalise({**CONFIGS["v3"], **changes}))
        return [layer for layer in range(8) if is_dense(facts, layer)]

    assert dense(first_k_dense_replace=3, moe_layer_freq=2) == [0, 1, 2, 3, 5, 7]
    assert dense(n_routed_experts=None) == list(range(8))
