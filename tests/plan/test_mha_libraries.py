"""The multi-head attention of a Llama plan: on Hopper with and without libraries, on the CPU,
captured or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.fakes import write_model
from glowplug.plugins.attention.shared import decode_choice
from tests.support.tiny import LLAMA

INSTALLED = {"sglang-kernel": "0.4.2.post2", "triton": "3.6.0"}
LARGE = {
    **LLAMA,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def installed(packages: dict[str, str]) -> PluginSet:
    made = load_plugins(entry_points=False)
    made.__dict__["software"] = replace(
        made.software, packages={**made.software.packages, **packages}
    )
    return made


@pytest.fixture(scope="module")
def plugins() -> Iterator[PluginSet]:
    """The built-ins, planned as if the libraries were installed."""
    yield installed(INSTALLED)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), LARGE)


def planned(
    model: Path,
    plugins: PluginSet,
    attention: dict[str, Any] | None = None,
    sheet: str = "1xh200",
    **more: Any,
) -> EnginePlan:
    config = {
        "model": str(model),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "attention": attention or {},
        **more,
    }
    return make_plan(config, plugins=plugins, hardware=replace(read_sheet(sheet), packages=None))


def refused(
    model: Path, plugins: PluginSet, attention: dict[str, Any], sheet: str = "1xh200", **more: Any
) -> dict[str, Refusal]:
    with pytest.raises(PlanRefused) as caught:
        planned(model, plugins, attention, sheet, **more)
    return {refusal.field: refusal for refusal in caught.value.refusals}


def test_a_card_without_libraries_captures_our_kernels(llama: Path) -> None:
    plan = planned(llama, installed({"sglang-kernel": "", "triton": "3.6.0"}))
    assert plan.choice("attention").name == "triton_mha"
    assert plan.choice("graphs").name == "cuda_graph"


def test_without_triton_plain_torch_is_left(llama: Path) -> None:
    plan = planned(llama, installed({"sglang-kernel": "", "triton": ""}))
    assert plan.choice("attention").name == "torch_mha" and plan.choice("graphs").name == "eager"


def test_the_cpu_keeps_plain_torch(llama: Path, plugins: PluginSet) -> None:
    assert (
        planned(llama, plugins, sheet="cpu", device="cpu").choice("attention").name == "torch_mha"
    )


def test_auto_chooses_the_measured_library_and_gives_the_reason(
    llama: Path, plugins: PluginSet
) -> None:
    plan = planned(llama, plugins)
    why = {decision.field: decision for decision in plan.decisions}["attention.use"]
    assert (why.value, why.by) == ("hopper_mha", "auto") and "measured fastest" in why.why
    assert plan.choice("graphs").name == "cuda_graph"


@pytest.mark.parametrize("queries", [1, 2, 8, 16, 48, 71, 1000])
@pytest.mark.parametrize("rows", [1, 9, 300, 4096])
def test_the_table_answers_for_every_shape(queries: int, rows: int) -> None:
    assert decode_choice.fastest_mha(queries, rows) in {"triton", "fa3"}


@pytest.mark.parametrize("name", ["hopper_mha", "fa3_mha", "triton_mha"])
def test_each_library_is_chosen_on_request(name: str, llama: Path, plugins: PluginSet) -> None:
    plan = planned(llama, plugins, {"use": name})
    assert plan.choice("attention").name == name and plan.choice("graphs").name == "cuda_graph"


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_an_eight_bit_cache_is_not_for_the_library_alone(
    dtype: str, llama: Path, plugins: PluginSet
) -> None:
    plan = planned(llama, plugins, {"kv_dtype": dtype})
    assert (plan.choice("attention").name, plan.kv_dtype) == ("hopper_mha", dtype)
    found = refused(llama, plugins, {"use": "fa3_mha", "kv_dtype": dtype})
    assert f"not in {dtype}" in found["attention.kv_dtype"].reason


@pytest.mark.parametrize("head", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fa3_takes_the_heads_that_it_is_compiled_for(
    head: int, dtype: str, plugins: PluginSet, tmp_path: Path
) -> None:
    model = write_model(tmp_path, {**LARGE, "head_dim": head})
    plan = planned(model, plugins, {"use": "fa3_mha"}, dtype=dtype)
    assert (plan.choice("attention").name, plan.kv_dtype) == ("fa3_mha", dtype)
    measured = (head, dtype) == (128, "bfloat16")
    chosen = planned(model, plugins, dtype=dtype).choice("attention").name
    assert chosen == ("hopper_mha" if measured else "triton_mha")


def test_shapes_that_the_library_is_not_compiled_for_are_refused(
    plugins: PluginSet, tmp_path: Path
) -> None:
    small = write_model(tmp_path / "small", {**LARGE, "head_dim": 80})
    assert planned(small, plugins).choice("attention").name == "triton_mha"
    found = refused(small, plugins, {"use": "fa3_mha"})["attention.use"]
    assert "head sizes of 64, 96, 128, 192, 256" in found.reason and "is 80" in found.reason
    other = write_model(tmp_path / "other", {**LARGE, "head_dim": 64})
    found = refused(other, plugins, {"use": "hopper_mha"})["attention.use"]
    assert "hopper_mha supports head sizes of 128; this model's is 64" in found.reason
    assert planned(small, plugins, dtype="float16").choice("attention").name == "triton_mha"


@pytest.mark.parametrize("name", ["fa3_mha", "hopper_mha"])
def test_a_cache_in_another_16_bit_dtype_than_the_compute_dtype_is_refused(
    name: str, llama: Path, plugins: PluginSet
) -> None:
    found = refused(llama, plugins, {"use": name, "kv_dtype": "float16"})["attention.kv_dtype"]
    assert "not in float16" in found.reason and found.fix.startswith('attention.kv_dtype = "auto"')
    assert planned(llama, plugins, {"use": name}).kv_dtype == "bfloat16"


def test_heads_too_large_for_a_multiprocessor(plugins: PluginSet, tmp_path: Path) -> None:
    large = write_model(tmp_path, {**LARGE, "head_dim": 512})
    assert planned(large, plugins).choice("attention").name == "torch_mha"
    assert (
        "head sizes up to 256"
        in refused(large, plugins, {"use": "triton_mha"})["attention.use"].reason
    )


def test_a_missing_library_is_named(llama: Path) -> None:
    found = refused(llama, installed({"sglang-kernel": "", "triton": "3.6.0"}), {"use": "fa3_mha"})[
        "attention.use"
    ]
    assert "sglang-kernel" in found.reason and 'pip install "sglang-kernel' in found.fix


@pytest.mark.parametrize(
    ("head", "dtype", "fits"),
    [
        (32, "float32", ["triton_mha", "torch_mha"]),
        (32, "bfloat16", ["triton_mha", "torch_mha"]),
        (64, "float16", ["fa3_mha", "triton_mha", "torch_mha"]),
        (128, "float32", ["triton_mha", "torch_mha"]),
        (128, "bfloat16", ["hopper_mha", "fa3_mha", "triton_mha", "torch_mha"]),
        (512, "bfloat16", ["torch_mha"]),
    ],
)
def test_the_suggestion_instead_of_latent_attention_fits(
    head: int, dtype: str, fits: list[str], plugins: PluginSet, tmp_path: Path
) -> None:
    model = write_model(tmp_path, {**LARGE, "head_dim": head})
    found = refused(model, plugins, {"use": "torch_mla"}, dtype=dtype)["attention.use"]
    assert "torch_mla computes mla attention" in found.reason
    named = [part.strip('"') for part in found.fix.removeprefix("attention.use = ").split(" or ")]
    assert sorted(named) == sorted(fits)
    for name in named:
        assert planned(model, plugins, {"use": name}, dtype=dtype).choice("attention").name == name


def test_a_dtype_without_a_backend_does_not_hide_the_models_backends(
    plugins: PluginSet, tmp_path: Path
) -> None:
    """A dtype of the cache has a refusal and a fix of its own."""
    model = write_model(tmp_path, LARGE)
    found = refused(model, plugins, {"use": "torch_mla", "kv_dtype": "fp8_e4m3"}, "cpu")
    assert (
        found["attention.use"].fix == 'attention.use = "torch_mha"'
        and "attention.kv_dtype" in found
    )
