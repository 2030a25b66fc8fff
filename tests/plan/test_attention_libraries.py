"""The attention library that a plan chooses on Hopper, and the reasons of refusals: packages,
sizes, pages, modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.plugins.attention.shared import decode_choice
from tests.plan.test_refusals import drafter, with_components

INSTALLED = {"sglang-kernel": "0.4.2.post2", "flashinfer-python": "0.6.11.post1", "triton": "3.6.0"}
SHAPES = Path(__file__).parents[2] / "models" / "shapes"


@pytest.fixture(scope="module")
def plugins() -> Iterator[PluginSet]:
    """The built-ins, planned as if the libraries were installed."""
    made = load_plugins(entry_points=False)
    packages = {**made.software.packages, **INSTALLED}
    made.__dict__["software"] = replace(made.software, packages=packages)
    yield made


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = msgspec.json.decode((SHAPES / "deepseek-v2-lite.json").read_bytes())
    return write_model(tmp_path_factory.mktemp("lite"), shape)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with V3's heads and a next-token layer."""
    return write_model(tmp_path_factory.mktemp("drafting"), slice_of())


def slice_of(**changes: Any) -> dict[str, Any]:
    shape: dict[str, Any] = msgspec.json.decode((SHAPES / "deepseek-v3-slice.json").read_bytes())
    return {**shape, "num_nextn_predict_layers": 1, **changes}


def planned(
    model: Path, plugins: PluginSet, attention: dict[str, Any] | None = None, **more: Any
) -> EnginePlan:
    config = {
        "model": str(model),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "attention": attention or {},
        **more,
    }
    return make_plan(config, plugins=plugins, hardware=replace(read_sheet("1xh200"), packages=None))


def refused(
    model: Path, plugins: PluginSet, attention: dict[str, Any], **more: Any
) -> dict[str, Refusal]:
    with pytest.raises(PlanRefused) as caught:
        planned(model, plugins, attention, **more)
    return {refusal.field: refusal for refusal in caught.value.refusals}


def test_auto_chooses_the_measured_library_and_gives_the_reason(
    lite: Path, plugins: PluginSet
) -> None:
    plan = planned(lite, plugins)
    why = {decision.field: decision for decision in plan.decisions}["attention.use"]
    assert (why.value, why.by) == ("hopper_mla", "auto") and "measured fastest" in why.why
    assert planned(lite, plugins, {"page_size": 16}).choice("attention").name == "triton_mla"
    assert planned(lite, plugins, {"kv_dtype": "fp8_e4m3"}).choice("attention").name == "hopper_mla"
    assert planned(
        lite, load_plugins(entry_points=False, block=["glowplug.plugins.attention.mla.hopper"])
    ).choice("attention").name in {"triton_mla", "torch_mla"}


@pytest.mark.parametrize("queries", [1, 2, 8, 16, 48, 64, 128, 256, 1000])
@pytest.mark.parametrize("rows", [1, 8, 9, 40, 300, 4096])
def test_the_table_answers_for_every_shape(queries: int, rows: int) -> None:
    assert decode_choice.fastest(queries, rows) in {"triton", "flashmla"}
    near = min(decode_choice.FASTEST, key=lambda known: abs(math.log2(known / queries)))
    assert decode_choice.fastest(queries, rows) == decode_choice.fastest(near, rows)
    beyond = decode_choice.fastest(queries, rows, decode_choice.SHORT_KEYS_MAX + 1)
    short = decode_choice.fastest(queries, rows, decode_choice.SHORT_KEYS_MAX)
    assert beyond == decode_choice.fastest(queries, rows)
    assert short == ("triton" if queries == 128 and rows <= 16 else beyond)


def decoding(plan: EnginePlan) -> str:
    found = {decision.field: decision for decision in plan.decisions}
    return found["kernels.decode_attention"].why if "kernels.decode_attention" in found else ""


def test_the_plan_names_the_decode_kernel_for_each_batch_size(
    lite: Path, drafting: Path, plugins: PluginSet
) -> None:
    assert decoding(planned(lite, plugins)) == (
        "fastest on an H200 for rows of 16 queries: our own kernel up to 66 rows, "
        "FlashMLA up to 112 rows, our own kernel up to 132 rows, FlashMLA up to 207 rows, "
        "our own kernel up to 264 rows, FlashMLA beyond"
    )
    few = "our own kernel up to 16 rows, FlashMLA beyond"
    assert decoding(planned(drafting, plugins, context_length=8192)).endswith(f"queries: {few}")
    longer = decoding(planned(drafting, plugins, context_length=8400))
    assert longer.endswith(
        f"queries: FlashMLA; if no row of a captured step is longer than 8320 keys: {few}"
    )
    eager = decoding(planned(drafting, plugins, context_length=8400, graphs={"use": "eager"}))
    assert eager.endswith(f"queries: FlashMLA; with a context_length of at most 8192: {few}")
    assert decoding(
        planned(drafting, plugins, speculative={"use": "nextn"}, context_length=4096)
    ) == ("fastest on an H200 for rows of 256 queries: FlashMLA")
    assert (
        decoding(planned(drafting, plugins, {"kv_dtype": "fp8_e4m3"}))
        == "FlashMLA does not read an 8-bit KV cache here"
    )
    assert not decoding(planned(lite, plugins, {"use": "triton_mla"}))


def test_some_sizes_are_captured_for_short_rows_too(
    lite: Path, drafting: Path, plugins: PluginSet
) -> None:
    def found(
        folder: Path, attention: dict[str, Any] | None = None, **config: Any
    ) -> tuple[int, tuple[int, ...]]:
        plan = planned(folder, plugins, attention, **config)
        line, sizes = (
            next((line for line in plan.budget if line.name == "graphs"), None),
            plan.sizes,
        )
        assert line is None or ("for short rows too" in line.how) == bool(sizes.short_rows)
        return sizes.short_keys, sizes.short_rows

    assert found(lite) == (decode_choice.SHORT_KEYS_MAX, (8, 12, 16, 24, 32))
    assert found(drafting, context_length=8400) == (
        decode_choice.SHORT_KEYS_MAX,
        (1, 2, 3, 4, 6, 8, 12, 16),
    )
    assert found(drafting, graphs={"use": "cuda_graph", "batch_sizes": [5, 20]}) == (
        decode_choice.SHORT_KEYS_MAX,
        (5,),
    )
    assert found(drafting, context_length=8320) == (
        decode_choice.SHORT_KEYS_MAX,
        (1, 2, 3, 4, 6, 8, 12, 16),
    )
    for nothing in (
        {"context_length": 8319},
        {"context_length": 8192},
        {"graphs": {"use": "eager"}},
        {"speculative": {"use": "nextn"}},
    ):
        assert found(drafting, **nothing) == (0, ())
    assert found(lite, {"use": "flashmla"}) == found(lite, {"use": "triton_mla"}) == (0, ())


@pytest.mark.parametrize("name", ["hopper_mla", "fa3_mla", "flashmla", "flashinfer_mla"])
def test_each_library_is_chosen_on_request(name: str, lite: Path, plugins: PluginSet) -> None:
    plan = planned(lite, plugins, {"use": name})
    assert plan.choice("attention").name == name
    assert plan.sizes.page_size == 64 and plan.dtype == plan.kv_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("fa3_mla", "sglang-kernel"),
        ("flashmla", "sglang-kernel"),
        ("flashinfer_mla", "flashinfer-python"),
    ],
)
def test_a_missing_package_is_named(name: str, package: str, lite: Path) -> None:
    plain = load_plugins(entry_points=False)
    plain.__dict__["software"] = replace(
        plain.software, packages={**plain.software.packages, package: ""}
    )
    refusal = refused(lite, plain, {"use": name})["attention.use"]
    assert package in refusal.reason and f'pip install "{package}' in refusal.fix


@pytest.mark.parametrize("name", ["fa3_mla", "flashmla", "flashinfer_mla"])
def test_other_sizes_of_a_head_are_refused(name: str, plugins: PluginSet, tmp_path: Path) -> None:
    refusal = refused(
        write_model(tmp_path / "v3", TINY_V3), plugins, {"use": name}, dtype="bfloat16"
    )["attention.use"]
    assert (
        "compiled for a latent size of 512" in refusal.reason
        and f"has {TINY_V3['kv_lora_rank']}" in refusal.reason
    )


def test_unsupported_pages_dtypes_and_drafts_are_refused(lite: Path, plugins: PluginSet) -> None:
    found = refused(lite, plugins, {"use": "flashmla", "page_size": 16})
    assert found["attention.page_size"].fix == "attention.page_size = 64"
    found = refused(lite, plugins, {"use": "fa3_mla", "kv_dtype": "fp8_e4m3"})
    assert "not in fp8_e4m3" in found["attention.kv_dtype"].reason
    found = refused(lite, plugins, {"use": "fa3_mla", "kv_dtype": "float16"}, dtype="bfloat16")
    assert "in the compute dtype bfloat16" in found["attention.kv_dtype"].reason
    assert "dtype" in refused(lite, plugins, {"use": "fa3_mla"}, dtype="float32")


@pytest.mark.parametrize("name", ["hopper_mla", "fa3_mla", "flashmla", "flashinfer_mla"])
@pytest.mark.parametrize("steps", [1, 3])
def test_drafts_are_taken_and_their_steps_captured(
    name: str, steps: int, drafting: Path, plugins: PluginSet
) -> None:
    plan = planned(drafting, plugins, {"use": name}, speculative={"use": "nextn", "steps": steps})
    assert (plan.choice("attention").name, plan.sizes.width) == (name, steps + 1)
    assert plan.choice("graphs").name == "cuda_graph"


def test_trees_are_refused_where_the_kernel_masks_chains_alone(drafting: Path) -> None:
    made = with_components(speculative=[drafter(tree=True)])
    made.__dict__["software"] = replace(
        made.software, packages={**made.software.packages, **INSTALLED}
    )
    found = refused(drafting, made, {"use": "flashinfer_mla"}, speculative={"use": "drafter"})[
        "attention.use"
    ]
    assert "reads causal chains only" in found.reason and "triton_mla" in found.fix


def test_flashmla_reads_an_fp8_cache_only_when_asked_for(lite: Path, plugins: PluginSet) -> None:
    """``auto`` keeps the measured format. An FP8 cache takes half the bytes; the other bytes of a
    step are the same.
    """
    plan, wide = (
        planned(lite, plugins, {"use": "flashmla", **more})
        for more in ({"kv_dtype": "fp8_e4m3"}, {})
    )
    assert (plan.choice("attention").name, plan.kv_dtype, plan.dtype) == (
        "flashmla",
        "fp8_e4m3",
        "bfloat16",
    )
    each, whole = (one.sizes.kv_bytes / one.sizes.num_pages for one in (plan, wide))
    assert 2 * each == whole and plan.sizes.page_size == 64
    activations = [
        next(line.bytes for line in one.budget if line.name == "activations")
        for one in (plan, wide)
    ]
    assert activations[0] == activations[1]
    assert plan.choice("graphs").name == "cuda_graph"
    assert planned(lite, plugins, {"kv_dtype": "fp8_e4m3"}).choice("attention").name == "hopper_mla"


def test_drafts_over_flashmlas_fp8_cache_are_refused(drafting: Path, plugins: PluginSet) -> None:
    """Every part of the fix leads to a plan."""
    asked, nextn = {"use": "flashmla", "kv_dtype": "fp8_e4m3"}, {"use": "nextn", "steps": 1}
    found = refused(drafting, plugins, asked, speculative=nextn)["attention.kv_dtype"]
    assert "FlashAttention-3, which reads no KV cache in fp8_e4m3" in found.reason
    assert (
        found.fix
        == 'attention.use = "auto", or attention.kv_dtype = "auto", or speculative.use = "none"'
    )
    plan = planned(drafting, plugins, {**asked, "use": "auto"}, speculative=nextn)
    assert (plan.choice("attention").name, plan.kv_dtype) == ("hopper_mla", "fp8_e4m3")
    assert (
        planned(drafting, plugins, {**asked, "kv_dtype": "auto"}, speculative=nextn).kv_dtype
        == "bfloat16"
    )
    assert planned(drafting, plugins, asked, speculative={"use": "none"}).kv_dtype == "fp8_e4m3"


def test_steps_that_flashmlas_fp8_kernel_does_not_support(
    lite: Path, drafting: Path, plugins: PluginSet
) -> None:
    asked = {"use": "flashmla", "kv_dtype": "fp8_e4m3"}
    found = refused(lite, plugins, asked, scheduler={"max_running_requests": 4096})[
        "scheduler.max_running_requests"
    ]
    assert found.fix.startswith("scheduler.max_running_requests = 4095")
    assert (
        planned(lite, plugins, asked, scheduler={"max_running_requests": 4095}).sizes.max_running
        == 4095
    )
    assert (
        "not in fp8_e5m2"
        in refused(lite, plugins, {**asked, "kv_dtype": "fp8_e5m2"})["attention.kv_dtype"].reason
    )
    made = with_components(speculative=[drafter()])
    made.__dict__["software"] = replace(
        made.software, packages={**made.software.packages, **INSTALLED}
    )
    assert (
        planned(drafting, made, asked, speculative={"use": "drafter", "steps": 31}).sizes.width
        == 32
    )
    found = refused(drafting, made, asked, speculative={"use": "drafter", "steps": 32})[
        "attention.kv_dtype"
    ]
    assert "takes at most 32 query tokens per row" in found.reason and "computes 33" in found.reason


@pytest.mark.parametrize(
    ("heads", "steps", "fits"),
    [
        (128, 3, True),
        (64, 3, True),
        (24, 4, True),
        (24, 5, False),
        (96, 1, False),
        (256, 1, False),
        (96, 0, True),
    ],
)
def test_heads_that_do_not_fill_flashinfers_tiles(
    heads: int, steps: int, fits: bool, plugins: PluginSet, tmp_path: Path
) -> None:
    model = write_model(
        tmp_path / "model", slice_of(num_attention_heads=heads, num_key_value_heads=heads)
    )
    more: dict[str, Any] = {"speculative": {"use": "nextn", "steps": steps}} if steps else {}
    if fits:
        assert (
            planned(model, plugins, {"use": "flashinfer_mla"}, **more).choice("attention").name
            == "flashinfer_mla"
        )
        return
    found = refused(model, plugins, {"use": "flashinfer_mla"}, **more)["attention.use"]
    assert (
        f"which is not a multiple of the {heads} heads of a rank" in found.reason
        and 'speculative.use = "none"' in found.fix
    )
