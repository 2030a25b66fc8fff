"""The plan states the GEMM provider of routed experts in block FP8, and why it is not DeepGEMM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.registry import PluginSet
from tests.gpu.traced_memory import planned, plugins_of_the_card, written
from tests.support.tiny import write_config

WITHOUT = {"sgl-deep-gemm": "", "deep-gemm": ""}


@pytest.fixture(scope="module")
def card() -> PluginSet:
    return plugins_of_the_card()


def said(folder: Path, plugins: PluginSet, **config: Any) -> tuple[Any, str]:
    plan = planned(folder, plugins, **config)
    found = [
        (each.value, each.why) for each in plan.decisions if each.field == "quantization.experts"
    ]
    assert len(found) <= 1
    return found[0] if found else (None, "")


def without_deep_gemm(monkeypatch: pytest.MonkeyPatch, plugins: PluginSet) -> None:
    packages = {**plugins.software.packages, **WITHOUT}
    monkeypatch.setitem(plugins.__dict__, "software", replace(plugins.software, packages=packages))


def test_deep_gemm_runs_by_load_where_it_is_installed(card: PluginSet, tmp_path: Path) -> None:
    value, why = said(written(tmp_path, "deepseek-v3", 4), card, context_length=4096)
    assert value == "by load" and "35 rows or more" in why


def test_our_kernels_run_where_deep_gemm_is_not_installed(
    card: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_deep_gemm(monkeypatch, card)
    value, why = said(written(tmp_path, "deepseek-v3", 4), card, context_length=4096)
    assert value == "triton" and (
        "DeepGEMM is not installed; our warp-specialised kernel runs above 40 rows per expert"
        in why
    )
    assert "pip install sgl-deep-gemm" in why


@pytest.mark.parametrize(
    ("hidden", "dtype", "words"),
    [
        (128, "float32", "no float32 results"),
        (192, "bfloat16", "a hidden size that is a multiple of 128, not 192"),
    ],
)
def test_our_kernels_run_where_deep_gemm_cannot(
    hidden: int, dtype: str, words: str, card: PluginSet, tmp_path: Path
) -> None:
    value, why = said(write_config(tmp_path, "v3_fp8", hidden_size=hidden), card, dtype=dtype)
    assert value == "triton" and words in why


@pytest.mark.parametrize(
    "quantization",
    [{"use": "block_fp8", "experts": "triton"}, {"use": "block_fp8", "activations": "none"}],
)
def test_no_provider_is_stated_without_a_choice(
    quantization: dict[str, Any], card: PluginSet, tmp_path: Path
) -> None:
    value, why = said(
        written(tmp_path, "deepseek-v3", 4), card, context_length=4096, quantization=quantization
    )
    assert value in {None, "triton"} and "our own kernels" not in why


def test_no_provider_is_stated_for_models_without_experts(card: PluginSet, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama", hidden_size=256)
    assert said(folder, card, dtype="bfloat16", quantization={"use": "block_fp8"}) == (None, "")
