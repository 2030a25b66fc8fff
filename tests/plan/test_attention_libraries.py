"""Which attention library a plan takes on Hopper, and why it refuses one: packages, sizes, pages, modes."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.machine import read_sheet
from glowplug.core.plan import EnginePlan
from glowplug.core.plugins import PluginSet, load_plugins
from glowplug.core.resolve import plan as make_plan
from glowplug.core.testing.fakes import TINY_V3, write_model
from glowplug.plugins.attention import measured

INSTALLED = {"sglang-kernel": "0.4.2.post2", "flashinfer-python": "0.6.11.post1", "triton": "3.6.0"}
SHAPES = Path(__file__).parents[2] / "models" / "shapes"


@pytest.fixture(scope="module")
def plugins() -> Iterator[PluginSet]:
    """The built-ins where the libraries are installed, whatever is here."""
    made = load_plugins(entry_points=False)
    packages = {**made.software.packages, **INSTALLED}
    made.__dict__["software"] = replace(made.software, packages=packages)
    yield made


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = msgspec.json.decode((SHAPES / "deepseek-v2-lite.json").read_bytes())
    return write_model(tmp_path_factory.mktemp("lite"), shape)


def planned(model: Path, plugins: PluginSet, attention: dict[str, Any] | None = None, **more: Any) -> EnginePlan:
    config = {"model": str(model), "weights": {"use": "random"}, "skip_tokenizer": True,
              "attention": attention or {}, **more}
    return make_plan(config, plugins=plugins, hardware=read_sheet("1xh200"))


def refused(model: Path, plugins: PluginSet, attention: dict[str, Any], **more: Any) -> dict[str, Refusal]:
    with pytest.raises(PlanRefused) as caught:
        planned(model, plugins, attention, **more)
    return {refusal.field: refusal for refusal in caught.value.refusals}


def test_auto_takes_the_measured_one_and_says_so(lite: Path, plugins: PluginSet) -> None:
    plan = planned(lite, plugins)
    why = {decision.field: decision for decision in plan.decisions}["attention.use"]
    assert (why.value, why.by) == ("hopper_mla", "auto") and "measured fastest" in why.why
    assert planned(lite, plugins, {"page_size": 16}).choice("attention").name == "triton_mla"
    assert planned(lite, plugins, {"kv_dtype": "fp8_e4m3"}).choice("attention").name == "hopper_mla"
    assert planned(lite, load_plugins(entry_points=False, block=["glowplug.plugins.attention.hopper_mla"])).choice(
        "attention").name in {"triton_mla", "torch_mla"}


@pytest.mark.parametrize("queries", [1, 2, 8, 16, 48, 64, 128, 256, 1000])
@pytest.mark.parametrize("rows", [1, 8, 9, 40, 300, 4096])
def test_the_table_answers_for_every_shape(queries: int, rows: int) -> None:
    assert measured.fastest(queries, rows) in {"triton", "flashmla"}
    near = min(measured.FASTEST, key=lambda known: abs(math.log2(known / queries)))
    assert measured.fastest(queries, rows) == measured.fastest(near, rows)


@pytest.mark.parametrize("name", ["hopper_mla", "fa3_mla", "flashmla", "flashinfer_mla"])
def test_each_is_taken_when_asked_for(name: str, lite: Path, plugins: PluginSet) -> None:
    plan = planned(lite, plugins, {"use": name})
    assert plan.choice("attention").name == name
    assert plan.sizes.page_size == 64 and plan.dtype == plan.kv_dtype == "bfloat16"


@pytest.mark.parametrize(("name", "package"), [("fa3_mla", "sglang-kernel"), ("flashmla", "sglang-kernel"),
                                               ("flashinfer_mla", "flashinfer-python")])
def test_a_missing_package_is_named(name: str, package: str, lite: Path) -> None:
    plain = load_plugins(entry_points=False)
    plain.__dict__["software"] = replace(plain.software, packages={**plain.software.packages, package: ""})
    refusal = refused(lite, plain, {"use": name})["attention.use"]
    assert package in refusal.reason and f'pip install "{package}' in refusal.fix


@pytest.mark.parametrize("name", ["fa3_mla", "flashmla", "flashinfer_mla"])
def test_other_sizes_of_a_head_are_refused(name: str, plugins: PluginSet, tmp_path: Path) -> None:
    refusal = refused(write_model(tmp_path / "v3", TINY_V3), plugins, {"use": name}, dtype="bfloat16")["attention.use"]
    assert "compiled for a latent of 512" in refusal.reason and f"has {TINY_V3['kv_lora_rank']}" in refusal.reason


def test_pages_dtypes_and_drafts_that_a_library_does_not_take(lite: Path, plugins: PluginSet) -> None:
    found = refused(lite, plugins, {"use": "flashmla", "page_size": 16})
    assert found["attention.page_size"].fix == "attention.page_size = 64"
    found = refused(lite, plugins, {"use": "fa3_mla", "kv_dtype": "fp8_e4m3"})
    assert "not in fp8_e4m3" in found["attention.kv_dtype"].reason
    found = refused(lite, plugins, {"use": "fa3_mla", "kv_dtype": "float16"}, dtype="bfloat16")
    assert "of the compute dtype bfloat16" in found["attention.kv_dtype"].reason
    assert "dtype" in refused(lite, plugins, {"use": "fa3_mla"}, dtype="float32")
