"""A library named for GEMMs that do not run on this device is reported in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.conftest import Planner


@pytest.mark.parametrize(
    ("quantization", "idle"),
    [
        ({"gemm": "cutlass"}, {"quantization.gemm"}),
        ({"gemm": "auto", "experts": "deep_gemm"}, {"quantization.experts"}),
        ({"activations": "none"}, set()),
    ],
)
def test_a_named_provider_without_effect_on_a_cpu(
    quantization: dict[str, Any], idle: set[str], planned: Planner, v3_fp8: Path
) -> None:
    plan = planned({"model": str(v3_fp8), "quantization": {"use": "block_fp8", **quantization}})
    said = {
        decision.field: decision.why for decision in plan.decisions if "no effect" in decision.why
    }
    assert set(said) == idle
    assert all("weights are dequantised while they load" in why for why in said.values())
