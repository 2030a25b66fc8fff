"""Formats of weights and caches under their published names: ``fp8`` and ``fp8_e5m2``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.entrypoints.front.llm import LLM
from tests.plan.conftest import Planner
from tests.plan.test_flags import given
from tests.plan.test_mha_libraries import LARGE
from tests.support.published import LITE, V3


def planned_with(plugins: PluginSet, model: str, *words: str) -> EnginePlan:
    ranks = ["--facts", "8xh200", "--tp", "8"] if model == V3 else ["--facts", "1xh200"]
    return given(plugins, "--model", model, "--load-format", "dummy", *ranks, *words).plan()


def decision_of(plan: EnginePlan, field: str) -> tuple[Any, str, str]:
    (one,) = (decision for decision in plan.decisions if decision.field == field)
    return one.value, one.by, one.why


@pytest.mark.parametrize(
    ("model", "value", "why"),
    [
        (LITE, "quantized while loading", "the checkpoint is not quantized"),
        (V3, "as stored", "already fp8 in 128x128 blocks; nothing is quantized again"),
    ],
)
def test_fp8_is_block_fp8_made_while_loading_or_as_stored(
    plugins: PluginSet, model: str, value: str, why: str
) -> None:
    plan = planned_with(plugins, model, "--quantization", "fp8")
    assert plan.choice("quantization").name == "block_fp8"
    assert decision_of(plan, "quantization.use") == ("block_fp8", "operator", "--quantization fp8")
    remark = decision_of(plan, "quantization.weights")
    assert remark[:2] == (value, "block_fp8") and why in remark[2]
    silent = planned_with(plugins, model)
    assert all(decision.field != "quantization.weights" for decision in silent.decisions)


def test_fp8_is_not_stacked_on_other_formats(plugins: PluginSet, tmp_path: Path) -> None:
    stated = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    model = write_model(tmp_path, {**TINY_V3, "quantization_config": stated})
    with pytest.raises(PlanRefused) as caught:
        planned_with(plugins, str(model), "--quantization", "fp8")
    found = {refusal.field: refusal for refusal in caught.value.refusals}["quantization.use"]
    assert "already quantized (awq" in found.reason and "leave quantization out" in found.fix


def test_a_configuration_file_may_say_fp8_too(planned: Planner) -> None:
    plan = planned({"quantization": {"use": "fp8", "activations": "none"}})
    assert plan.choice("quantization").name == "block_fp8"
    assert plan.choice("quantization").options["activations"] == "none"


def test_unquantised_weights_are_served_as_block_fp8() -> None:
    config = {
        "model": "models/shapes/tiny-v2.json",
        "weights": {"use": "random"},
        "skip_tokenizer": True,
    }
    with LLM(**config, quantization={"use": "fp8"}) as llm:
        rounded = llm.generate([[5, 6, 7]])[0]
        assert llm.plan.choice("quantization").name == "block_fp8"
    assert rounded.finish_reason == "length" and len(rounded.token_ids) > 1


def followed(fix: str) -> list[str]:
    """Return every value that a fix ``attention.kv_dtype = "a" or "b"`` names."""
    head, _, rest = fix.partition("attention.kv_dtype = ")
    assert head == "" and rest
    return re.findall(r'"(\w+)"', rest.partition(",")[0])


@pytest.mark.parametrize(
    ("model", "words", "fixes"),
    [
        (V3, (), ["auto", "fp8_e4m3"]),
        (LITE, ("--attention-backend", "flashmla"), ["auto", "fp8_e4m3"]),
        (LITE, ("--attention-backend", "fa3"), ["auto"]),
    ],
)
def test_a_cache_in_e5m2_is_refused_with_fixes_that_work(
    plugins: PluginSet, model: str, words: tuple[str, ...], fixes: list[str]
) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned_with(plugins, model, *words, "--kv-cache-dtype", "fp8_e5m2")
    (refusal,) = caught.value.refusals
    assert refusal.field == "attention.kv_dtype" and "not in fp8_e5m2" in refusal.reason
    assert followed(refusal.fix) == fixes
    for kept in fixes:
        plan = planned_with(plugins, model, *words, "--kv-cache-dtype", kept)
        assert plan.kv_dtype == (kept if kept != "auto" else "bfloat16")


@pytest.mark.parametrize("backend", ["hopper_mha", "triton_mha"])
def test_multi_head_attention_keeps_a_cache_in_e5m2(
    plugins: PluginSet, tmp_path: Path, backend: str
) -> None:
    model = str(write_model(tmp_path, LARGE))
    words = ("--attention-backend", backend, "--kv-cache-dtype", "fp8_e5m2")
    plan = planned_with(plugins, model, *words)
    assert (plan.choice("attention").name, plan.kv_dtype) == (backend, "fp8_e5m2")
