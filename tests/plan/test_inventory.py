"""A third party's family, scheme and backend: their bytes in the plan, without a line in core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.weight_classes import TARGET
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.component import CONTRACT, Component
from glowplug.core.plugin.offers import ModelOffers, QuantizationOffers
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.fakes import component
from glowplug.models.families import ModelOptions, llama_inventory
from glowplug.plugins.quantization.shared.skipped_modules import UNLISTED
from tests.plan.test_refusals import with_components
from tests.plugins.strata import GROUP
from tests.support.reading import built_in, read_config, read_shape
from tests.support.tiny import CONFIGS, write_config

HIDDEN, HEADS, KV_HEADS, DIM, INNER, BANKS, DEPTH, WORDS = 64, 8, 4, 8, 96, 4, 3, 254
CONFIG: dict[str, Any] = {
    "architectures": ["StrataForCausalLM"],
    "width": HIDDEN,
    "depth": DEPTH,
    "readers": HEADS,
    "memories": KV_HEADS,
    "words": WORDS,
    "reach": 512,
    "banks": BANKS,
    "inner": INNER,
    "torch_dtype": "bfloat16",
}
QUANTIZED = {**CONFIG, "quantization_config": {"quant_method": "quads"}}
MESHES: list[dict[str, int]] = [{}, {"tp": 2}, {"tp": 4}, {"tp": 4, "ep": 2}, {"tp": 4, "dp": 2}]
USES = {"tp": "tensor", "ep": "ep_moe", "dp": "dp_attention"}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(["tests.plugins.strata"], entry_points=False)


def matrix(rows: int, columns: int, quantized: bool) -> dict[str, Tensor]:
    """Return the stored tensors of one kernel by leaf name."""
    if not quantized:
        return {"kernel": torch.zeros(rows, columns, dtype=torch.bfloat16)}
    return {
        "codes": torch.zeros(rows, columns // 4, dtype=torch.uint8),
        "steps": torch.zeros(rows, columns // GROUP, dtype=torch.float16),
    }


#: kernel -> (rows, columns, dimension that ranks split; None: none)
SHAPES: dict[str, tuple[int, int, int | None]] = {
    "read": (HEADS * DIM, HIDDEN, 0),
    "recall": (KV_HEADS * DIM, HIDDEN, 0),
    "store": (KV_HEADS * DIM, HIDDEN, 0),
    "speak": (HIDDEN, HEADS * DIM, 1),
    "up": (INNER, HIDDEN, 0),
}


def checkpoint(quantized: bool, nextn: int = 0) -> dict[str, Tensor]:
    """Every tensor of the model by its published name, and some that are not loaded."""
    found: dict[str, Tensor] = {
        "table": torch.zeros(WORDS, HIDDEN, dtype=torch.bfloat16),
        "answers.kernel": torch.zeros(WORDS, HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(DEPTH + nextn):
        block = f"strata.{layer}"
        kernels = {name: shape[:2] for name, shape in SHAPES.items() if name != "up"}
        if layer:
            kernels |= {f"banks.{bank}.up": SHAPES["up"][:2] for bank in range(BANKS)}
            found[f"{block}.sorter.kernel"] = torch.zeros(BANKS, HIDDEN, dtype=torch.bfloat16)
        else:
            kernels["up"] = SHAPES["up"][:2]
        if layer >= DEPTH:
            glue = torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
            found[f"{block}.glue.kernel"] = glue
        for name, (rows, columns) in kernels.items():
            for leaf, tensor in matrix(rows, columns, quantized).items():
                found[f"{block}.{name}.{leaf}"] = tensor
        found[f"{block}.scale"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        found[f"{block}.speak.bias"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        found[f"{block}.history"] = torch.zeros(999, dtype=torch.bfloat16)
    return found


def held_bytes(tensors: dict[str, Tensor], mesh: dict[str, int], rank: int) -> int:
    """Bytes of one rank: each stored tensor is cut by hand, and the gate is held in float32."""
    tp = mesh.get("tp", 1)
    within = tp // mesh.get("dp", 1)
    total = 0
    for name, tensor in tensors.items():
        kernel = name.rpartition(".")[0].rpartition(".")[2]
        if name.endswith(".history"):
            continue
        if name.endswith("sorter.kernel"):
            total += tensor.numel() * 4
        elif name in ("table", "answers.kernel"):
            each = -(-WORDS // within)
            first = rank % within * each
            total += tensor[first : first + each].nbytes
        elif name.endswith((".bias", ".scale", "glue.kernel")):
            total += tensor.nbytes
        else:
            dimension = SHAPES[kernel][2]
            parts = tp if kernel == "up" else within
            assert dimension is not None and tensor.shape[dimension] % parts == 0
            total += tensor.chunk(parts, dimension)[0].nbytes
    return total


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def plan_of(
    plugins: PluginSet, folder: Path, mesh: dict[str, int] | None = None, **more: Any
) -> EnginePlan:
    config: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "bfloat16",
        "device": "cuda",
        "parallel": [{"use": USES[axis], "size": size} for axis, size in (mesh or {}).items()],
        **more,
    }
    if not list(folder.glob("*.safetensors")):
        config["weights"] = {"use": "random"}
    return make_plan(config, plugins=plugins, hardware=read_sheet("4xh200"))


def line(plan: EnginePlan, name: str) -> Any:
    return next(line for line in plan.budget if line.name == name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quads"])
@pytest.mark.parametrize("headers", [False, True], ids=["config.json", "headers"])
def test_a_family_and_a_scheme_of_a_third_party_get_their_bytes_right(
    plugins: PluginSet, tmp_path: Path, mesh: dict[str, int], quantized: bool, headers: bool
) -> None:
    tensors = checkpoint(quantized)
    config = QUANTIZED if quantized else CONFIG
    plan = plan_of(plugins, folder_of(tmp_path / "m", config, tensors if headers else None), mesh)
    assert plan.mesh == mesh and plan.choice("model").name == "strata"
    assert plan.choice("quantization").name == ("quads" if quantized else "none")
    weights = line(plan, "weights")
    assert weights.how.startswith("tensor headers" if headers else "arithmetic")
    assert [weights.on(rank) for rank in range(plan.ranks)] == [
        held_bytes(tensors, mesh, rank) for rank in range(plan.ranks)
    ]


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quads"])
def test_a_next_token_layer_of_another_name(
    plugins: PluginSet, tmp_path: Path, quantized: bool
) -> None:
    config = {**(QUANTIZED if quantized else CONFIG), "glimpses": 1}
    tensors = checkpoint(quantized, nextn=1)
    stated = plugins.read_model(str(folder_of(tmp_path / "c", config, None)))
    read = plugins.read_model(str(folder_of(tmp_path / "h", config, tensors)))
    assert stated.facts.nextn_layers == read.facts.nextn_layers == 1
    assert dict(stated.elements) == dict(read.elements)
    assert {kind.draft for kind in read.elements} == {TARGET, 0}


@pytest.mark.parametrize(("mesh", "heads"), [({}, 4), ({"tp": 2}, 2), ({"tp": 4, "dp": 2}, 2)])
def test_the_kv_cache_is_counted_by_the_backends_own_entries(
    plugins: PluginSet, tmp_path: Path, mesh: dict[str, int], heads: int
) -> None:
    more: dict[str, Any] = {"attention": {"use": "stepped"}}
    plan = plan_of(plugins, folder_of(tmp_path / "m", CONFIG, None), mesh, **more)
    pairs = torch.zeros(DEPTH, heads, 2, DIM, dtype=torch.int8)
    steps = torch.zeros(DEPTH, heads, 2, dtype=torch.float16)
    tokens = plan.sizes.num_pages * plan.sizes.page_size
    assert plan.sizes.kv_bytes == tokens * (pairs.nbytes + steps.nbytes)


def test_a_backend_of_another_kind_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused) as caught:
        folder = write_config(tmp_path, "llama")
        plan_of(built_in(), folder, attention={"use": "torch_mla"}, device="cpu")
    assert any("torch_mla computes mla attention" in r.reason for r in caught.value.refusals)


def test_sizes_that_do_not_divide_are_refused_in_the_familys_words(
    plugins: PluginSet, tmp_path: Path
) -> None:
    with pytest.raises(PlanRefused) as caught:
        plan_of(plugins, folder_of(tmp_path / "m", CONFIG, None), {"tp": 3})
    found = [r.reason for r in caught.value.refusals if r.by == "tensor"]
    assert found[0] == "strata.0.read: readers of 8 does not split over 3 ranks"
    assert found[1].startswith("strata.0.recall: memories of 4")


# ---- what declares nothing -----------------------------------------------------------------------

OLD = ModelOffers(architectures=frozenset({"StrataForCausalLM"}), kind="mha")
PUBLISHED = {
    **CONFIG,
    "hidden_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "vocab_size": WORDS,
}


def test_a_family_without_an_inventory_is_counted_by_headers_with_a_remark(tmp_path: Path) -> None:
    own = with_components(model=[component("model", "old", OLD)])
    tensors = checkpoint(False)
    folder = folder_of(tmp_path / "m", PUBLISHED, tensors)
    plan = plan_of(own, folder)
    assert line(plan, "weights").bytes == sum(tensor.nbytes for tensor in tensors.values())
    notes = plan.facts.model.notes
    assert notes == (
        "the model family 'old' (extra-dist 2.1) declares no tensors: bytes come from the tensor "
        "headers, and activations are estimated",
    )
    with pytest.raises(PlanRefused) as caught:
        plan_of(own, folder, {"tp": 2})
    (refusal,) = caught.value.refusals
    assert (refusal.by, "ModelOffers.inventory" in refusal.fix) == ("tensor", True)


def test_a_family_without_an_inventory_needs_headers(tmp_path: Path) -> None:
    own = with_components(model=[component("model", "old", OLD)])
    with pytest.raises(PlanRefused) as caught:
        plan_of(own, folder_of(tmp_path / "m", PUBLISHED, None))
    (refusal,) = caught.value.refusals
    assert refusal.field == "model" and "their bytes are not known" in refusal.reason


def test_a_family_has_the_inventory_of_one_with_the_same_factory(tmp_path: Path) -> None:
    offers = ModelOffers(architectures=frozenset({"MistralForCausalLM"}), kind="mha")
    factory = "glowplug.models.llama:LlamaFamily"
    family = Component(
        "mistral", ModelOptions, factory, offers, summary="Llama's layers", contract=CONTRACT
    )
    own = with_components(model=[family])
    folder = write_config(tmp_path, "llama", architectures=["MistralForCausalLM"])
    plan = plan_of(own, folder, {"tp": 2})
    same = plan_of(own, write_config(tmp_path / "llama", "llama"), {"tp": 2})
    assert plan.choice("model").name == "mistral" and plan.budget == same.budget
    assert plan.facts.model.notes == ()


def test_an_unknown_architecture_and_an_unknown_format_are_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused) as caught:
        plan_of(built_in(), folder_of(tmp_path / "a", PUBLISHED, None), {"tp": 2})
    assert "StrataForCausalLM" in caught.value.refusals[0].reason
    folder = write_config(tmp_path, "llama", quantization_config={"quant_method": "quads"})
    with pytest.raises(PlanRefused) as caught:
        plan_of(built_in(), folder)
    assert any("quads" in refusal.reason for refusal in caught.value.refusals)


def test_a_scheme_that_declares_no_format_is_remarked_on(tmp_path: Path) -> None:
    scheme = QuantizationOffers(reads=frozenset({"triads"}))
    own = with_components(quantization=[component("quantization", "old", scheme)])
    stated = {"quantization_config": {"quant_method": "triads"}}
    plan = plan_of(own, write_config(tmp_path / "triads", "llama", **stated))
    plain = plan_of(own, write_config(tmp_path / "plain", "llama"))
    assert plan.choice("quantization").name == "old"
    assert line(plan, "weights").bytes == line(plain, "weights").bytes
    assert plan.facts.model.notes == (
        "no quantization scheme declares how 'triads' weights are stored: they count as "
        "unquantised",
    )


def test_the_first_family_and_the_first_scheme_that_declare_count(tmp_path: Path) -> None:
    scheme = QuantizationOffers(reads=frozenset({"fp8"}))
    own = with_components(quantization=[component("quantization", "late", scheme)])
    folder = str(write_config(tmp_path, "v3_fp8"))
    assert own.read_model(folder).elements == built_in().read_model(folder).elements


# ---- the built-in families -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "tiny-llama"])
def test_families_and_schemes_leave_the_same_modules_unquantised(name: str) -> None:
    facts = read_shape(name).facts
    family = next(
        found.component.offers
        for found in built_in().components("model")
        if facts.architecture in getattr(found.component.offers, "architectures", ())
    )
    assert isinstance(family, ModelOffers) and family.inventory is not None
    matrices = [spec for spec in family.inventory(facts).tensors if spec.columns]
    assert matrices
    for spec in matrices:
        assert spec.quantized == (spec.module.rpartition(".")[2] not in UNLISTED), spec.name


def test_an_inventory_accepts_a_config_that_lacks_keys() -> None:
    """Checks refuse it later, with the key that is missing."""
    for name in ("v2", "v3", "llama"):
        bare = {
            key: value
            for key, value in CONFIGS[name].items()
            if key in ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")
            or key in ("num_attention_heads", "kv_lora_rank", "n_routed_experts")
        }
        assert read_config(bare).elements


def test_declared_sizes_travel_with_the_plan(tmp_path: Path) -> None:
    import msgspec

    facts = read_config(CONFIGS["v3"]).facts
    again = msgspec.json.decode(msgspec.json.encode(facts), type=type(facts))
    assert again == facts and again.splits and any(again.sizes.routed)
    assert (
        read_config(CONFIGS["llama"]).facts.splits
        == llama_inventory(read_config(CONFIGS["llama"]).facts).splits
    )
