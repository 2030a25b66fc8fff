"""``device = "cuda"`` without such a device: the cause is reported, and beside it only reasons that
hold on any device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.resolve import plan
from glowplug.core.plugin.registry import PluginSet, load_plugins

CUDA = {"model": "embedded", "device": "cuda"}


def refusals(
    plugins: PluginSet, hardware: HardwareFacts | None, config: dict[str, Any]
) -> tuple[Refusal, ...]:
    with pytest.raises(PlanRefused) as caught:
        plan(
            config, plugins=plugins, hardware=hardware, contributed={"executor.use": "multiprocess"}
        )
    return caught.value.refusals


@pytest.mark.parametrize("packages", [None, {}], ids=["installed", "bare"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"parallel": [{"use": "tensor", "size": 2}]},
        {"graphs": {"use": "cuda_graph"}},
        {"dtype": "bfloat16"},
        {"sampling": {"use": "triton"}},
        {"attention": {"kv_dtype": "fp8_e4m3"}},
        {"ops": {"use": "triton"}},
    ],
    ids=lambda more: ",".join(more) or "alone",
)
def test_a_missing_cuda_device_is_the_only_reason(
    plugins: PluginSet, cpu: HardwareFacts, more: dict[str, Any], packages: dict[str, str] | None
) -> None:
    (refusal,) = refusals(plugins, replace(cpu, packages=packages), {**CUDA, **more})
    assert refusal.field == "device" and refusal.reason == "CPU, 8 cores, 32 GiB has no CUDA device"
    assert refusal.fix == 'device = "cpu"'


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"scheduler": {"chunk_sizes": 3}}, "scheduler.chunk_sizes"),
        ({"cache": {"use": "lru"}}, "cache.use"),
        ({"quantization": {"use": "w8a8_int8"}}, "quantization.use"),
        ({"attention": {"use": "torch_mha"}}, "attention.use"),
        ({"attention": {"use": "flashmla"}}, "attention.use"),
    ],
    ids=lambda more: str(more)[:30],
)
def test_reasons_that_stand_on_any_device_are_reported_beside_it(
    plugins: PluginSet, cpu: HardwareFacts, more: dict[str, Any], field: str
) -> None:
    found = refusals(plugins, replace(cpu, packages={}), {**CUDA, **more})
    assert sorted(refusal.field for refusal in found) == sorted(["device", field])
    assert not any("not installed" in refusal.reason for refusal in found)


def test_a_cpu_build_of_torch_has_no_cuda_device(plugins: PluginSet) -> None:
    machine = replace(read_sheet("1xh200"), packages={"torch": "2.11.0+cpu"})
    (refusal,) = refusals(plugins, machine, CUDA)
    assert (
        refusal.field == "device"
        and refusal.reason == "the installed torch is a CPU build (2.11.0+cpu)"
    )
    assert 'device = "cpu"' in refusal.fix and "pip install" in refusal.fix
    assert plan({"model": "embedded"}, plugins=plugins, hardware=machine).device == "cpu"


def test_a_plugin_may_refuse_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: HardwareFacts
) -> None:
    (tmp_path / "no_device_of_a_test.py").write_text(
        "from glowplug.core.errors import Refusal\n"
        "from glowplug.core.plugin.hookspecs import hookimpl\n\n@hookimpl\n"
        "def check_plan(context):\n"
        "    return [Refusal('test', 'device', 'not today', 'tomorrow')]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = load_plugins(["no_device_of_a_test"], entry_points=False)
    for device in ("cpu", "auto"):
        (refusal,) = refusals(plugins, cpu, {"model": "embedded", "device": device})
        assert refusal.reason == "not today"
    assert len(refusals(plugins, cpu, CUDA)) == 2


def test_a_present_cuda_device_is_not_refused(plugins: PluginSet) -> None:
    packages = {"torch": "2.11.0+cu130", "triton": "3.6.0"}
    assert (
        plan(
            CUDA, plugins=plugins, hardware=replace(read_sheet("1xh200"), packages=packages)
        ).device
        == "cuda"
    )
