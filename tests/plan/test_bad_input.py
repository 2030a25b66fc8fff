"""Plans for a GPU, a library or a table that does not fit: refused or replaced, with the reason,
before anything is loaded. All components are built-ins; the sheets describe GPUs that need not
be present.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import DeviceFacts, HardwareFacts
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.testing.harness.fakes import write_model
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.plugins.quantization.shared import provider_choice, tuned_tables
from tests.support.narrow_checkpoints import AWQ
from tests.support.tables import forget

#: the installed packages are chosen by ``make``
H200 = replace(read_sheet("1xh200"), packages=None)
LIBRARIES = {
    "sglang-kernel": "0.4.2.post2",
    "flashinfer-python": "0.6.11.post1",
    "sgl-deep-gemm": "0.1.0",
    "triton": "3.6.0",
    "torch": "2.11.0",
}
LITE = Path(__file__).parents[2] / "models" / "shapes" / "deepseek-v2-lite.json"


def card(name: str, compute: int, gigabytes: int) -> HardwareFacts:
    return replace(H200, devices=(DeviceFacts(name, gigabytes << 30, compute),), name=f"1 x {name}")


T4, L40S = card("Tesla T4", 75, 64), card("NVIDIA L40S", 89, 48)
B200 = card("NVIDIA B200", 100, 180)
A100, H100, H20 = (
    card("NVIDIA A100-SXM4-80GB", 80, 80),
    card("NVIDIA H100", 90, 80),
    card("NVIDIA H20", 90, 96),
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EnginePlan]]:
    """A function that plans V2-Lite's shape with ``packages`` as the installed ones."""
    model = write_model(tmp_path_factory.mktemp("lite"), msgspec.json.decode(LITE.read_bytes()))

    def made(
        config: dict[str, Any] | None = None,
        hardware: HardwareFacts = H200,
        packages: dict[str, str] | None = None,
        extra: tuple[str, ...] = (),
    ) -> EnginePlan:
        plugins = load_plugins(extra, entry_points=False)
        installed = {**plugins.software.packages, **(LIBRARIES if packages is None else packages)}
        plugins.__dict__["software"] = replace(plugins.software, packages=installed)
        return make_plan(
            {
                "model": str(model),
                "weights": {"use": "random"},
                "skip_tokenizer": True,
                **(config or {}),
            },
            plugins=plugins,
            hardware=hardware,
        )

    yield made


def refusals(make: Callable[..., EnginePlan], *args: Any, **more: Any) -> dict[str, Refusal]:
    with pytest.raises(PlanRefused) as caught:
        make(*args, **more)
    return {refusal.field: refusal for refusal in caught.value.refusals}


def decision(plan: EnginePlan, field: str) -> Decision:
    return next(found for found in plan.decisions if found.field == field)


@pytest.mark.parametrize("name", ["hopper_mla", "triton_mla", "fa3_mla", "flashmla"])
def test_a_backend_for_another_card_is_refused(make: Callable[..., EnginePlan], name: str) -> None:
    """The fix names a backend for this model on this GPU, and planning with it succeeds."""
    found = refusals(make, {"attention": {"use": name}}, A100)["attention.use"]
    assert "SM90" in found.reason and "SM80" in found.reason and "A100" in found.reason
    assert found.fix == 'attention.use = "torch_mla"'
    assert make({"attention": {"use": "torch_mla"}}, A100).choice("attention")


class TestASheetsPackages:
    """The packages that a sheet states replace those of this machine; a sheet without packages uses
    this machine's.
    """

    STATED = replace(H200, packages=LIBRARIES)

    def test_packages_of_the_sheet_count_where_they_are_missing_here(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        here = dict.fromkeys(LIBRARIES, "")
        assert make(packages=here).choice("attention").name == "torch_mla"
        plan = make(hardware=self.STATED, packages=here)
        assert plan.choice("attention").name == make().choice("attention").name == "hopper_mla"
        assert plan.facts.software.packages.items() >= LIBRARIES.items()
        said = decision(plan, "packages")
        assert said.value == "of the sheet" and "sglang-kernel 0.4.2.post2" in said.why

    def test_packages_missing_from_the_sheet_do_not_count(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        plan = make(hardware=replace(H200, packages={"triton": "3.6.0"}))
        assert plan.choice("attention").name == "triton_mla"
        assert plan.facts.software.packages.keys() == {"torch", "triton"}, (
            "torch is wherever the engine is"
        )
        found = refusals(make, {"attention": {"use": "hopper_mla"}}, replace(H200, packages={}))[
            "attention.use"
        ]
        assert "not installed" in found.reason

    def test_a_sheet_without_packages_uses_those_of_this_machine(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        assert all(found.field != "packages" for found in make().decisions)

    def test_a_cpu_build_of_torch(self, make: Callable[..., EnginePlan]) -> None:
        plan = make(hardware=replace(self.STATED, packages={**LIBRARIES, "torch": "2.11.0+cpu"}))
        assert (
            plan.device == "cpu"
            and decision(plan, "device").why == "the installed torch is a CPU build"
        )
        assert (
            make(
                hardware=replace(self.STATED, packages={**LIBRARIES, "torch": "2.11.0+cu130"})
            ).device
            == "cuda"
        )


def test_suggested_packages_can_be_used_on_the_card(make: Callable[..., EnginePlan]) -> None:
    """No fix suggests a package that is refused for its GPU."""
    asked = {"attention": {"use": "flashmla"}}
    assert (
        refusals(make, asked, B200)["attention.use"].fix
        == 'attention.use = "triton_mla" or "torch_mla"'
    )
    without = refusals(make, asked, B200, packages=dict.fromkeys(LIBRARIES, ""))["attention.use"]
    assert without.fix == 'attention.use = "torch_mla"'


@pytest.mark.parametrize("hardware", [A100, L40S, T4])
def test_another_card_gets_backends_that_run_there_with_the_reason(
    make: Callable[..., EnginePlan], hardware: HardwareFacts
) -> None:
    assert decision(make(), "attention.use").value == "hopper_mla"
    plan = make(hardware=hardware)
    chosen, graphs, ops = (
        decision(plan, f"{section}.use") for section in ("attention", "graphs", "ops")
    )
    compute = f"SM{hardware.devices[0].compute}"
    assert chosen.value == "torch_mla" and chosen.by == "auto" and compute in chosen.why
    assert "triton_mla supports SM90, 100, 103" in chosen.why
    assert graphs.value == "eager" and "torch_mla" in graphs.why
    assert ops.value == ("torch" if hardware is T4 else "triton") and (compute in ops.why) == (
        hardware is T4
    )


def test_each_kernel_states_its_lowest_compute_capability(make: Callable[..., EnginePlan]) -> None:
    found = refusals(make, {"ops": {"use": "triton"}, "sampling": {"use": "triton"}}, T4)
    for field in ("ops.use", "sampling.use"):
        assert "triton supports SM80 and later; 1 x Tesla T4 has SM75" in found[field].reason
        assert found[field].fix.startswith(f'{field} = "torch"')


@pytest.mark.parametrize("name", ["block_fp8", "w8a8_int8"])
@pytest.mark.parametrize("hardware", [A100, L40S])
def test_quantized_products_need_a_card_that_they_are_made_for(
    make: Callable[..., EnginePlan], name: str, hardware: HardwareFacts
) -> None:
    found = refusals(make, {"quantization": {"use": name}}, hardware)["quantization.use"]
    assert f"SM{hardware.devices[0].compute}" in found.reason and "SM90, 100, 103" in found.reason
    assert found.fix.startswith(
        f'quantization.use = "{name}" with quantization.activations = "none"'
    )
    dequantized = {"quantization": {"use": name, "activations": "none"}}
    assert make(dequantized, hardware).choice("quantization").name == name


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("block_fp8", "gemm", "deep_gemm"),
        ("block_fp8", "gemm", "cublas"),
        ("block_fp8", "experts", "deep_gemm"),
        ("block_fp8", "experts", "deep_gemm_masked"),
        ("block_fp8", "experts", "cutlass"),
        ("w8a8_int8", "gemm", "cutlass"),
    ],
)
def test_libraries_are_named_on_the_cards_that_they_are_called_on(
    make: Callable[..., EnginePlan], name: str, option: str, value: str
) -> None:
    asked = {"quantization": {"use": name, option: value}}
    found = refusals(make, asked, B200)
    assert list(found) == [f"quantization.{option}"]
    refusal = found[f"quantization.{option}"]
    assert f"{value} is used only on SM90" in refusal.reason and "SM100" in refusal.reason
    assert (
        refusal.fix == f'quantization.{option} = "auto"'
        and make(asked).choice("quantization").name == name
    )
    for own in ("auto", "triton"):
        assert (
            make({"quantization": {"use": name, option: own}}, B200).choice("quantization").name
            == name
        )


def test_int4_gemms_need_such_a_card(make: Callable[..., EnginePlan], tmp_path: Path) -> None:
    stated = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    }
    config = {**msgspec.json.decode(LITE.read_bytes()), "quantization_config": stated}
    model = {"model": str(write_model(tmp_path / "awq", config))}
    for hardware, packages, word in (
        (A100, LIBRARIES, "SM80"),
        (H200, {**LIBRARIES, "triton": ""}, "not installed"),
    ):
        found = refusals(make, model, hardware, packages)["quantization.use"]
        assert word in found.reason and "quantization.dequantize = true" in found.fix
        kept = {**model, "quantization": {"use": "awq", "dequantize": True}}
        assert make(kept, hardware, packages).choice("quantization").name == "awq"


def test_a_checkpoint_in_fp8_on_a_card_that_is_not_for_it(
    make: Callable[..., EnginePlan], tmp_path: Path
) -> None:
    """No scheme was requested: the fix names the scheme that reads this checkpoint, and planning
    with it succeeds.
    """
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**msgspec.json.decode(LITE.read_bytes()), "quantization_config": stated}
    model = {"model": str(write_model(tmp_path / "fp8", config))}
    found = refusals(make, model, A100)["quantization.use"]
    assert (
        "block_fp8 needs kernels written for SM90, 100, 103; 1 x NVIDIA A100-SXM4-80GB has SM80"
        in found.reason
    )
    assert found.fix.startswith(
        'quantization.use = "block_fp8" with quantization.activations = "none"'
    )
    followed = {**model, "quantization": {"use": "block_fp8", "activations": "none"}}
    assert make(followed, A100).choice("quantization").name == "block_fp8"


@pytest.mark.parametrize(
    ("name", "without"),
    [("block_fp8", {"activations": "none"}), ("w8a8_int8", {"activations": "none"})],
)
@pytest.mark.parametrize("version", ["", "2.3.1"])
def test_quantized_products_need_triton(
    make: Callable[..., EnginePlan], name: str, without: dict[str, Any], version: str
) -> None:
    packages = {**dict.fromkeys(LIBRARIES, ""), "triton": version}
    found = refusals(make, {"quantization": {"use": name}}, packages=packages)["quantization.use"]
    assert (
        f"triton>=3.5 ({version or 'not installed'})" in found.reason
        and 'pip install "triton>=3.5"' in found.fix
    )
    assert (
        make({"quantization": {"use": name, **without}}, packages=packages)
        .choice("quantization")
        .name
        == name
    )


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"attention": {"use": "hopper_mla"}}, "sglang-kernel"),
        ({"attention": {"use": "hopper_mla"}}, "triton"),
        ({"attention": {"use": "triton_mla"}}, "triton"),
        ({"ops": {"use": "triton"}}, "triton"),
        ({"sampling": {"use": "triton"}}, "triton"),
    ],
)
def test_a_missing_library_is_named_with_its_installation(
    make: Callable[..., EnginePlan], config: dict[str, Any], package: str
) -> None:
    field = f"{next(iter(config))}.use"
    found = refusals(make, config, packages={**LIBRARIES, package: ""})[field]
    assert (
        package in found.reason
        and "not installed" in found.reason
        and f'pip install "{package}' in found.fix
    )


@pytest.mark.parametrize(
    ("scheme", "option", "value", "package"),
    [
        ("block_fp8", "gemm", "deep_gemm", "sgl-deep-gemm"),
        ("block_fp8", "experts", "deep_gemm", "sgl-deep-gemm"),
        ("block_fp8", "gemm", "cutlass", "sglang-kernel"),
        ("block_fp8", "gemm", "flashinfer", "flashinfer-python"),
        ("block_fp8", "experts", "deep_gemm_masked", "sgl-deep-gemm"),
        ("block_fp8", "experts", "cutlass", "sglang-kernel"),
        ("w8a8_int8", "gemm", "cutlass", "sglang-kernel"),
    ],
)
def test_a_missing_library_that_was_named_for_gemms(
    make: Callable[..., EnginePlan], scheme: str, option: str, value: str, package: str
) -> None:
    """The missing library is named. With the library installed, or without naming it (the fix),
    there is a plan.
    """
    asked, without = {"quantization": {"use": scheme, option: value}}, {**LIBRARIES, package: ""}
    found = refusals(make, asked, packages=without)[f"quantization.{option}"]
    assert f'"{value}" needs {package}' in found.reason and f'pip install "{package}"' in found.fix
    assert make(asked, packages={**LIBRARIES, package: "9"}).choice("quantization")
    assert f'quantization.{option} = "auto"' in found.fix
    assert make({"quantization": {"use": scheme, option: "auto"}}, packages=without).choice(
        "quantization"
    )


@pytest.mark.parametrize(
    ("option", "library"),
    [
        *(("gemm", name) for name in ("cutlass", "cublas", "deep_gemm", "flashinfer")),
        *(("experts", name) for name in ("deep_gemm", "deep_gemm_masked", "cutlass")),
    ],
)
def test_a_library_that_makes_16_bits_is_refused_for_float32(
    make: Callable[..., EnginePlan], option: str, library: str
) -> None:
    scheme = {"use": "block_fp8", option: library}
    found = refusals(make, {"quantization": scheme, "dtype": "float32"})
    assert list(found) == [f"quantization.{option}"]
    said = found[f"quantization.{option}"]
    assert (
        "supports 16-bit results only" in said.reason
        and f'quantization.{option} = "auto"' in said.fix
    )
    for fits in ("auto", "triton"):
        assert make({"quantization": {**scheme, option: fits}, "dtype": "float32"}).choice(
            "quantization"
        )
    assert make({"quantization": scheme, "dtype": "bfloat16"}).choice("quantization")
    assert make({"quantization": {**scheme, "activations": "none"}, "dtype": "float32"}).choice(
        "quantization"
    )


def test_every_library_that_a_component_can_use_is_looked_for() -> None:
    """Otherwise a plan counts on fewer libraries than the run uses."""
    assert {
        "sgl-deep-gemm",
        "deep-gemm",
        "sglang-kernel",
        "flashinfer-python",
    } <= load_plugins().packages


def test_a_plan_without_libraries_names_the_missing_ones(
    make: Callable[..., EnginePlan],
) -> None:
    plan = make(packages=dict.fromkeys(LIBRARIES, ""))
    assert plan.choice("attention").name == "torch_mla" and plan.choice("ops").name == "torch"
    assert decision(plan, "attention.use").why


@pytest.mark.parametrize(
    ("name", "page"), [("hopper_mla", 16), ("hopper_mla", 128), ("flashmla", 1)]
)
def test_a_page_size_that_a_kernel_does_not_take(
    make: Callable[..., EnginePlan], name: str, page: int
) -> None:
    found = refusals(make, {"attention": {"use": name, "page_size": page}})["attention.page_size"]
    assert str(page) in found.reason and found.fix == "attention.page_size = 64"


def test_a_batch_list_past_the_memory(make: Callable[..., EnginePlan]) -> None:
    """The GPU has room for everything except the graphs of that list; the refusal states their
    bytes.
    """
    config = {
        "scheduler": {"max_running_requests": 4096},
        "memory": {"kv_tokens": 4096},
        "context_length": 2048,
    }
    eager = {**config, "graphs": {"use": "eager"}}
    listed = {"use": "cuda_graph", "batch_sizes": [1, 4096], "max_batch": 4096}
    needed = sum(line.bytes for line in make(eager).budget) + make(eager).sizes.kv_bytes
    tight = card("NVIDIA H100", 90, 1 + int(needed / 0.97 / 2**30))
    assert make(eager, tight).choice("graphs").name == "eager"
    found = refusals(make, {**config, "graphs": listed}, tight)
    assert (
        "GiB" in found["graphs.batch_sizes"].reason
        and "graphs.max_batch" in found["graphs.batch_sizes"].fix
    )
    assert (
        make({**config, "graphs": {**listed, "batch_sizes": [1, 8]}}, tight).choice("graphs").name
        == "cuda_graph"
    )


class TestTooLittleMemory:
    """Each refusal names the cause, and a plan that follows its fix fits or is refused for the next
    cause.
    """

    @staticmethod
    def of(gigabytes: float) -> HardwareFacts:
        return replace(H200, devices=(DeviceFacts("NVIDIA H100", int(gigabytes * (1 << 30)), 90),))

    def test_a_fraction(self, make: Callable[..., EnginePlan]) -> None:
        found = refusals(make, {"memory": {"fraction": 0.1}})["memory.fraction"]
        value = re.fullmatch(
            r"memory.fraction = (0\.\d+) or more, or leave it out \(98%\)", found.fix
        )
        assert "10% of the device's" in found.reason and value is not None
        assert make({"memory": {"fraction": float(value[1])}}).sizes.num_pages > 1
        assert make().sizes.num_pages > 1

    def test_graphs(self, make: Callable[..., EnginePlan]) -> None:
        needed = sum(line.bytes for line in make().budget if line.name != "kv cache")
        tight = self.of(needed / 0.98 / (1 << 30) - 0.1)
        found = refusals(make, hardware=tight)["graphs.batch_sizes"]
        assert (
            found.fix.startswith('graphs.use = "eager"; or fewer graphs')
            and "graphs " in found.reason
        )
        assert make({"graphs": {"use": "eager"}}, tight).sizes.num_pages > 1
        assert (
            make(
                {"graphs": {"use": "cuda_graph", "max_batch": 8, "prefill": False}}, tight
            ).sizes.num_pages
            > 1
        )

    def test_steps(self, make: Callable[..., EnginePlan]) -> None:
        lines = {line.name: line.bytes for line in make().budget if line.name != "kv cache"}
        tight = self.of(
            (sum(lines.values()) - lines["graphs"] - lines["activations"] / 2) / 0.98 / (1 << 30)
        )
        found = refusals(make, hardware=tight)["scheduler.chunk_size"]
        assert (
            found.fix
            == "a smaller scheduler.chunk_size, and a smaller scheduler.max_running_requests"
        )
        followed = {
            "scheduler": {"chunk_size": 256, "max_running_requests": 8},
            "graphs": {"use": "eager"},
        }
        assert make(followed, tight).sizes.num_pages > 1

    def test_weights(self, make: Callable[..., EnginePlan]) -> None:
        found = refusals(make, hardware=self.of(20))["model"]
        assert "a quantized checkpoint" in found.fix and "more ranks" in found.fix
        assert make({"quantization": {"use": "block_fp8"}}, self.of(20)).sizes.num_pages > 1


class TestTunedTables:
    def test_the_plan_for_the_measured_card_names_its_tables(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        found = decision(make(), tuned_tables.FIELD)
        assert found.value == "measured" and "NVIDIA H200 with Triton 3.6" in found.why

    @pytest.mark.parametrize("hardware", [H100, H20, B200])
    def test_tables_of_another_card_are_replaced_by_rules(
        self, make: Callable[..., EnginePlan], hardware: HardwareFacts
    ) -> None:
        found = decision(make(hardware=hardware), tuned_tables.FIELD)
        assert found.value == "rules" and hardware.devices[0].name in found.why
        assert (
            "tables are for NVIDIA H200 with Triton 3.6 and do not apply to" in found.why
            and "glowplug tune moe" in found.why
        )

    def test_tables_of_another_triton_are_replaced_by_rules(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        found = decision(make(packages={**LIBRARIES, "triton": "3.7.1"}), tuned_tables.FIELD)
        assert found.value == "rules" and "Triton 3.7" in found.why

    def test_tables_are_not_mentioned_where_none_could_be_used(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        for plan in (make(packages=dict.fromkeys(LIBRARIES, "")), make(hardware=A100)):
            assert not [found for found in plan.decisions if found.field == tuned_tables.FIELD]

    def test_the_provider_of_the_token_scores_is_stated(
        self, make: Callable[..., EnginePlan], own_tables: Path
    ) -> None:
        assert not [
            found
            for found in make(hardware=B200).decisions
            if found.field == tuned_tables.HEAD_FIELD
        ]
        plan, ours = make(), {"way": "tiles"}
        vocab, hidden = plan.facts.model.vocab_size, plan.facts.model.hidden_size
        path = own_tables / tuned.head_file_name(vocab, hidden, ("NVIDIA H100", "3.6"))
        tuned.keep(path, {1: {"way": "cublas"}, 8: ours, 32: ours})
        forget()
        found = decision(make(hardware=H100), tuned_tables.HEAD_FIELD)
        assert found.value == "by rows" and (
            "own kernel at or near 8, 32 rows, cuBLAS at others, as measured on NVIDIA H100"
            in found.why
        )
        assert not [
            each
            for each in make({"dtype": "float16"}, H100).decisions
            if each.field == tuned_tables.HEAD_FIELD
        ]

    def test_the_gemm_provider_is_stated(self, make: Callable[..., EnginePlan]) -> None:
        fp8 = {"quantization": {"use": "block_fp8"}}
        found = decision(make(fp8), provider_choice.FIELD)
        assert (found.value, found.by) == (
            "by shape",
            "facts",
        ) and "fastest provider measured on NVIDIA H200" in found.why
        assert (
            "candidates: triton, deep_gemm, cutlass, flashinfer, cublas; "
            "other shapes: triton up to 64 rows"
        ) in found.why
        assert "then the first available of cublas, cutlass, triton" in found.why
        without = decision(
            make(fp8, packages={**LIBRARIES, "sgl-deep-gemm": ""}), provider_choice.FIELD
        )
        assert (
            "candidates: triton, cutlass, flashinfer, cublas (not installed: deep_gemm)"
            in without.why
        )
        other = decision(make(fp8, H100), provider_choice.FIELD)
        assert other.value == "rules" and "no measurements for NVIDIA H100" in other.why
        assert decision(make(fp8, B200), provider_choice.FIELD).value == "triton"
        named = decision(
            make({"quantization": {"use": "block_fp8", "gemm": "cutlass"}}), provider_choice.FIELD
        )
        assert (named.value, named.by) == ("cutlass", "operator")

    def test_a_dequantising_scheme_with_inherited_options_names_no_provider(
        self, make: Callable[..., EnginePlan]
    ) -> None:
        plan = make({"quantization": {"use": "plain_torch"}}, extra=("tests.plugins.teacher",))
        assert not [found for found in plan.decisions if found.field == provider_choice.FIELD]

    @pytest.mark.parametrize(
        ("scheme", "kind", "candidates", "rule"),
        [
            (
                "w8a8_int8",
                "int8-gemm",
                "candidates: triton, cutlass",
                "triton below 64 rows, cutlass from 64 rows",
            ),
            (
                "awq",
                "awq-gemm",
                "candidates: triton, cublas",
                "triton below 512 rows, cublas from 512 rows",
            ),
        ],
    )
    def test_the_gemm_provider_of_narrow_weights_is_stated(
        self,
        make: Callable[..., EnginePlan],
        tmp_path: Path,
        scheme: str,
        kind: str,
        candidates: str,
        rule: str,
    ) -> None:
        """Narrow weights follow the GPU's own table; a table of another GPU is passed over, with
        the reason.
        """
        stated = {"quantization_config": {**AWQ, "group_size": 64}} if scheme == "awq" else {}
        model = str(write_model(tmp_path, {**msgspec.json.decode(LITE.read_bytes()), **stated}))
        config = {"model": model, "quantization": {"use": scheme}}
        found = decision(make(config), provider_choice.FIELD)
        assert (found.value, found.by) == ("by shape", "facts")
        assert found.why == (
            f"the fastest provider measured on NVIDIA H200 for each of 3 shapes; {candidates}; "
            "other shapes: the provider of the nearest measured shape"
        )
        other = decision(make(config, H100), provider_choice.FIELD)
        assert other.value == "rules" and other.why == (
            "no measurements for NVIDIA H100 (those of NVIDIA H200 do not apply): "
            f"{rule}; {candidates}; run `glowplug tune {kind}` to measure"
        )
        blackwell = decision(make(config, B200), provider_choice.FIELD)
        assert blackwell.value == ("rules" if scheme == "awq" else "triton")
        named = decision(
            make({**config, "quantization": {"use": scheme, "gemm": "triton"}}),
            provider_choice.FIELD,
        )
        assert (named.value, named.by) == ("triton", "operator")
        wide = {"dequantize": True} if scheme == "awq" else {"activations": "none"}
        assert not [
            said
            for said in make({**config, "quantization": {"use": scheme, **wide}}).decisions
            if said.field == provider_choice.FIELD
        ]

    def test_cutlass_for_int8_is_not_installed(self, make: Callable[..., EnginePlan]) -> None:
        plan = make(
            {"quantization": {"use": "w8a8_int8"}}, packages={**LIBRARIES, "sglang-kernel": ""}
        )
        assert (
            "candidates: triton (not installed: cutlass)"
            in decision(plan, provider_choice.FIELD).why
        )

    def test_the_stated_gemm_provider_is_the_one_that_runs(self) -> None:
        pytest.importorskip("triton")
        from glowplug.plugins.quantization.block_fp8 import gemm_providers

        providers = gemm_providers.Providers("auto", {})
        assert (
            tuple(providers._order(provider_choice.FEW_ROWS_MAX, 512, 512))
            == provider_choice.UNMEASURED_FEW_ROWS
        )
        assert (
            tuple(providers._order(provider_choice.FEW_ROWS_MAX + 1, 512, 512))
            == provider_choice.UNMEASURED_MANY_ROWS
        )
        assert gemm_providers.provider_path().parent == tuned.FOLDER
        assert len(provider_choice.measured("fp8_gemm", "NVIDIA H200", "3.6.1")) >= 5

    def test_file_names_are_those_that_kernels_look_for(self) -> None:
        pytest.importorskip("triton")
        names = [path.name for path in tuned.FOLDER.glob("*triton=*.json")]
        assert names and tuned_tables.made_for(names) == {("NVIDIA H200", "3.6")}
        assert tuned_tables.made_for([tuned.file_name("N=1,K=2", "bfloat16")]) == {
            (tuned.device_name(), tuned.triton_version())
        }
