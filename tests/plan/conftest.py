"""Fixtures of the plan tests: the built-ins loaded once, a tiny V3 folder, and a plan function with
short defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model

Planner = Callable[..., EnginePlan]
Refuser = Callable[..., dict[str, Refusal]]


@pytest.fixture(scope="session")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


@pytest.fixture(scope="session")
def cpu() -> HardwareFacts:
    return read_sheet("cpu")


@pytest.fixture(scope="session")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds config.json only."""
    return write_model(tmp_path_factory.mktemp("v3"), TINY_V3)


@pytest.fixture(scope="session")
def v3_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quantized = {
        **TINY_V3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    return write_model(tmp_path_factory.mktemp("v3fp8"), quantized)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), TINY_LLAMA)


@pytest.fixture(scope="session")
def planned(plugins: PluginSet, cpu: HardwareFacts, v3: Path) -> Planner:
    """A function: ``planned(section={...})`` plans a tiny V3 with random weights on the CPU
    sheet.
    """

    def run(
        config: dict[str, Any] | None = None, *, hardware: HardwareFacts | None = None, **more: Any
    ) -> EnginePlan:
        full = {"model": str(v3), "weights": {"use": "random"}, **(config or {})}
        return make_plan(
            full, plugins=more.pop("plugins", plugins), hardware=hardware or cpu, **more
        )

    return run


@pytest.fixture(scope="session")
def refused(planned: Planner) -> Refuser:
    """A function that returns the refusals of a configuration by field and checks that each is
    complete.
    """

    def run(config: dict[str, Any] | None = None, **more: Any) -> dict[str, Refusal]:
        with pytest.raises(PlanRefused) as caught:
            planned(config, **more)
        for refusal in caught.value.refusals:
            assert (
                refusal.by and refusal.field and refusal.reason and refusal.fix and refusal.origin
            ), refusal
        return {refusal.field: refusal for refusal in caught.value.refusals}

    return run
