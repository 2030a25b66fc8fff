"""`bench kernels` records calls across slots with their cost, times them again and compares
providers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import Field

from glowplug.core.facts.machine import software
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.component import Component, Options
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import kernels
from glowplug.entrypoints.bench.kernel import timing as kernel_timing
from glowplug.entrypoints.bench.kernel.calls import Call
from glowplug.entrypoints.bench.kernel.world import KernelStepShape, KernelWorld, NoiseSource
from glowplug.entrypoints.bench.kernels import _providers, variants
from glowplug.entrypoints.checkpoints.cut_model import cut_config, write_cut
from tests.support.tiny import CONFIGS, write_config

SIZES: dict[str, Any] = {
    "skip_tokenizer": True,
    "weights": {"use": "random"},
    "device": "cpu",
    "context_length": 128,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def recorded(name: str, shape: KernelStepShape, plugins: PluginSet, folder: Path) -> list[Call]:
    write_cut(CONFIGS[name], folder)
    plan = make_plan({"model": str(folder), **SIZES}, plugins=plugins)
    return KernelWorld(plan, plugins).calls(shape)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return bench.run(parser.parse_args(list(words)))


def test_a_cut_model_keeps_one_layer_of_each_kind() -> None:
    v3 = {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_nextn_predict_layers": 1,
    }
    cut, times = cut_config(v3)
    assert times == {0: 3, 1: 58}
    assert (
        cut["num_hidden_layers"],
        cut["first_k_dense_replace"],
        cut["num_nextn_predict_layers"],
    ) == (2, 1, 0)
    assert cut_config({"num_hidden_layers": 8}) == ({"num_hidden_layers": 1}, {0: 8})
    assert cut_config({**v3, "first_k_dense_replace": 0})[1] == {0: 61}


@pytest.mark.parametrize("name", ["v2", "v3", "llama", "v3_fp8"])
@pytest.mark.parametrize("shape", [KernelStepShape(3, 20), KernelStepShape(1, 24, 24)])
def test_every_slot_of_a_step_is_recorded(
    name: str, shape: KernelStepShape, plugins: PluginSet, tmp_path: Path
) -> None:
    calls = recorded(name, shape, plugins, tmp_path)
    moe = name != "llama"
    assert {call.slot for call in calls} == {"attention", "ops", "linear", "sampling"} | (
        {"experts"} if moe else set()
    )
    names = [call.name for call in calls]
    assert names[-2:] == ["lm_head", "sample"]
    assert names.count("experts") == names.count("gate") == moe
    assert sum(call.slot == "attention" for call in calls) == 1 + moe
    assert {call.layer for call in calls} == ({None, 0, 1} if moe else {None, 0})
    for call in calls:
        assert call.moved > 0
        assert call.out is None or bool(torch.isfinite(call.out.float()).all()), call.name
        call.run()


def test_costs_of_a_linear_layer_and_of_experts(plugins: PluginSet, tmp_path: Path) -> None:
    calls = {
        call.name: call
        for call in recorded("v3", KernelStepShape(3, 20), plugins, tmp_path)
        if call.layer == 1
    }
    output = calls["self_attn.o_proj"]
    assert output.flops == 2 * 3 * 64 * 64
    assert output.moved == 4 * (64 * 64 + 2 * 3 * 64)
    assert output.shape == "3x64"
    experts = calls["experts"]
    one = 3 * 64 * 32
    assert experts.flops == 2 * 3 * 3 * one
    at_least, at_most = 3 * one * 4, 8 * one * 4
    assert at_least < experts.moved <= at_most + 2 * 4 * 3 * 64 + 9 * 12
    cached = calls["mla"]
    assert cached.moved > 3 * 20 * 40 * 4
    prefill = {
        call.name: call
        for call in recorded("v3", KernelStepShape(1, 20, 20), plugins, tmp_path)
        if call.layer == 1
    }
    pairs = 20 * 21 / 2
    assert prefill["mla"].flops == 2 * 4 * (pairs * (16 + 8 + 16) + 20 * 32 * 32)


def test_recording_is_repeatable_and_leaves_the_sampler_free(
    plugins: PluginSet, tmp_path: Path
) -> None:
    write_cut(CONFIGS["v2"], tmp_path)
    world = KernelWorld(make_plan({"model": str(tmp_path), **SIZES}, plugins=plugins), plugins)
    first, second = world.calls(KernelStepShape(2, 10)), world.calls(KernelStepShape(2, 10))
    assert [call.key for call in first] == [call.key for call in second]
    for one, other in zip(first, second):
        assert one.out is None or torch.equal(one.out, other.out), one.name
    assert len(world.calls(KernelStepShape(4, 9))) == len(first)


def test_noise_is_scaled_for_its_use() -> None:
    class Wanted:
        def __init__(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> None:
            self.name, self.shape, self.dtype, self.optional = name, shape, dtype, False
            self.index = (slice(None), slice(0, 8)) if len(shape) == 2 else (slice(None),)

        def store(self, value: torch.Tensor) -> None:
            raise AssertionError("the source stores nothing")

    source = NoiseSource("cpu", torch.bfloat16, 3)
    weight = source.read(Wanted("a.weight", (64, 256)))
    assert (weight.shape, weight.dtype) == ((64, 8), torch.bfloat16)
    assert 0.8 < float(weight.float().std()) * 16 < 1.2
    codes = source.read(Wanted("b.weight", (256, 256), "float8_e4m3fn"))
    scales = source.read(Wanted("b.weight_scale_inv", (2, 2)))
    assert 0.7 < float(codes.float().std() * scales.mean()) * 16 < 1.3
    assert abs(float(source.read(Wanted("norm.weight", (999,))).float().mean()) - 1) < 0.05


class Clock:
    """A stand-in for the module ``time``: reading it takes ``look`` seconds, a call takes its own
    time.
    """

    def __init__(self, look: float = 0.0) -> None:
        self.look = look
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += self.look
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("each", "calls"), [(0.02, kernel_timing.HOST_RUNS + 1), (0.001, 51)])
def test_a_call_is_timed(each: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is repeated until the time is filled, and at least a few times; a warm-up call is not
    timed.
    """
    clock, spent = Clock(), list[float]()

    def call() -> None:
        spent.append(each)
        clock.spend(each if len(spent) > 1 else 7.0)

    monkeypatch.setattr(kernel_timing, "time", clock)
    found, captured = kernel_timing.seconds(call, "cpu")
    assert not captured
    assert found == pytest.approx(each)
    assert len(spent) == pytest.approx(calls, abs=1)


def test_a_call_of_no_time_is_timed_no_longer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the clock counts as well."""
    clock = Clock(look=1e-5)
    monkeypatch.setattr(kernel_timing, "time", clock)
    kernel_timing.seconds(lambda: None, "cpu")
    assert clock.now == pytest.approx(kernel_timing.HOST_SECONDS, abs=1e-3)


class _Options(Options):
    use: Literal["x"] = "x"
    gemm: Literal["auto", "one", "two"] = Field("auto", json_schema_extra={"provider": True})
    grouped: Literal["auto", "three"] = Field("auto", json_schema_extra={"provider": "experts"})
    plain: Literal["a", "b"] = "a"


def test_marked_options_are_providers() -> None:
    component = Component("x", _Options, "nowhere:X")
    found = list(
        _providers("quantization", component, {"use": "x", "gemm": "one"}, ("linear", "experts"))
    )
    assert [(one.label, one.slots) for one in found] == [
        ("x gemm=two", ("linear", "experts")),
        ("x grouped=three", ("experts",)),
    ]
    assert found[0].overrides == {"quantization": {"use": "x", "gemm": "two"}}


def test_only_backends_of_the_models_kind_and_device_are_tried(
    plugins: PluginSet, tmp_path: Path
) -> None:
    write_config(tmp_path, "llama")
    labels = [
        one.label
        for one in variants(make_plan({"model": str(tmp_path), **SIZES}, plugins=plugins), plugins)
    ]
    assert not {label for label in labels if "mla" in label or "triton" in label}


def test_providers_of_a_cuda_device_are_not_tried_on_a_cpu(
    plugins: PluginSet, tmp_path: Path
) -> None:
    write_config(tmp_path, "v3_fp8")
    plan = make_plan({"model": str(tmp_path), **SIZES}, plugins=plugins)
    assert plan.choice("quantization").name == "block_fp8"
    assert not [one.label for one in variants(plan, plugins) if one.label.startswith("block_fp8")]


def test_every_provider_of_the_ops_is_tried(plugins: PluginSet, tmp_path: Path) -> None:
    write_config(tmp_path, "v3")
    labels = [
        one.label
        for one in variants(make_plan({"model": str(tmp_path), **SIZES}, plugins=plugins), plugins)
    ]
    assert "torch_compile" in labels


COMPILED = pytest.param(
    True,
    marks=[
        pytest.mark.slow,
        pytest.mark.timeout(900),
        pytest.mark.skipif(not software(()).cxx, reason="needs a C++ compiler"),
    ],
)


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_a_table_and_a_record(
    compiled: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ``compiled``, torch.compile's ops are among the providers; compiling them takes half a
    minute.
    """

    def tried(*given: Any) -> Iterator[kernels.Variant]:
        return (one for one in variants(*given) if compiled or one.label != "torch_compile")

    monkeypatch.setattr(kernels, "variants", tried)
    monkeypatch.setattr(kernel_timing, "HOST_SECONDS", 0.001)
    out = tmp_path / "k.json"
    status = run(
        "kernels",
        "--model",
        "tiny-v3",
        "--batch-size",
        "1",
        "2",
        "--context",
        "20",
        "--prefill",
        "24",
        "--device",
        "cpu",
        "--bandwidth",
        "0.02",
        "--output-file",
        str(out),
    )
    assert status == 0
    shown = capsys.readouterr().out
    assert {"decode 1 x 20", "decode 2 x 20", "prefill 1 x 24"} <= {
        line.partition(":")[0] for line in shown.splitlines()
    }
    whole = json.loads(out.read_text())
    assert {row["slot"] for row in whole["rows"]} == {
        "attention",
        "ops",
        "linear",
        "experts",
        "sampling",
    }
    for row in whole["rows"]:
        assert row["us"] > 0 and row["share_of_floor"] > 0
        assert row["step_us"] == pytest.approx(row["us"] * round(row["step_us"] / row["us"]))
    assert whole["layers"] == {"0": 1, "1": 2}
    assert "command" in whole and whole["refused"] == {}


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels", "--model", "/nonexistent") == 2
    assert "nonexistent" in capsys.readouterr().err


def test_a_provider_that_fails_is_named_and_the_others_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels,
        "variants",
        lambda plan, plugins: iter(
            [
                kernels.Variant(
                    "broken", {"attention": {"use": "torch_mla", "page_size": 4096}}, ("attention",)
                )
            ]
        ),
    )
    assert (
        run(
            "kernels",
            "--model",
            "tiny-v2",
            "--batch-size",
            "1",
            "--context",
            "8",
            "--device",
            "cpu",
            "--slots",
            "attention",
        )
        == 0
    )
    assert "not measured: broken: " in capsys.readouterr().out
