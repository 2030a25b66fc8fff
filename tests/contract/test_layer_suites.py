"""Built-in ops, schemes, grammar libraries and a model family pass the suites of their slots."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import GrammarBackend, Ops, QuantizationScheme, Worker
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.ops import OpsSuite
from glowplug.core.testing.suites.quantization import QuantizationSuite
from glowplug.plugins.ops import triton_ops
from tests.mutants import layers, schemes

BLOCK = 128


class TestTorchOps(layers.Tables):
    pass


@pytest.mark.gpu
class TestTritonOps(OpsSuite):
    device = "cuda"

    def make(self) -> Ops:
        pytest.importorskip("triton")
        from glowplug.plugins.ops.triton_ops_runtime import TritonOps

        plan: Any = SimpleNamespace()
        return TritonOps(triton_ops.TritonOpsOptions(), plan, Worker(device="cuda"))


class TestLlama(layers.Models):
    pass


class TestNone(schemes.Schemes):
    pass


class TestNoneInBfloat16(schemes.Schemes):
    dtype = torch.bfloat16
    tolerance = 2e-2


class TestBlockFp8(QuantizationSuite):
    """Weights stored as E4M3 with one scale for each block of 128 x 128."""

    unit = BLOCK
    tolerance = 1e-4

    def plan(self) -> EnginePlan:
        plan = bare_plan()
        config = {
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK],
                "activation_scheme": "dynamic",
            }
        }
        model = replace(plan.facts.model, quant_method="fp8", config=config)
        return replace(plan, facts=replace(plan.facts, model=model))

    def make(self, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
        found: QuantizationScheme = make(
            "quantization", "block_fp8", plan, worker, activations="none"
        )
        return found

    def store(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
        blocks = weight.view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        stored = (blocks / scales[:, None, :, None]).view_as(weight)
        return {"weight": stored.to(torch.float8_e4m3fn), "weight_scale_inv": scales}

    def value(self, weight: Tensor) -> Tensor:
        found = self.store(weight)
        scales = found["weight_scale_inv"].repeat_interleave(BLOCK, 0)
        return found["weight"].to(weight.dtype) * scales.repeat_interleave(BLOCK, 1)


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
class TestLibraries:
    """Each test of the suite runs with each library."""

    @pytest.fixture
    def suite(self, library: str) -> layers.Grammars:
        pytest.importorskip(library)

        class Suite(layers.Grammars):
            def make(self) -> GrammarBackend:
                found: GrammarBackend = make("grammar", library, bare_plan(), Worker())
                return found

        return Suite()

    @pytest.mark.parametrize(
        "test", [name for name in dir(layers.Grammars) if name.startswith("test_")]
    )
    def test_of_the_suite(self, suite: layers.Grammars, test: str) -> None:
        for values in cases(getattr(suite, test)):
            getattr(suite, test)(*values)


def cases(test: Any) -> list[tuple[Any, ...]]:
    """Return the arguments of a test with at most one parameter."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return [(value,) for mark in marks for value in mark.args[1]] or [()]
