"""Ops compiled by inductor equal the references within rounding, are compiled once and kept between
processes.

The two programs that the first call of an op makes serve every number of tokens here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from glowplug.core.facts.machine import software
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plugin.decided import Decided
from glowplug.core.protocols import Ops, Worker
from glowplug.kernels.elementwise import activation_reference as activation, norm_reference as norm
from glowplug.kernels.moe import route_reference as routing
from glowplug.plugins.ops import torch_compile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not software(()).cxx, reason="needs a C++ compiler"),
]
PLAN: Any = SimpleNamespace(sizes=SimpleNamespace(width=2))
STARTS = """
import json, sys
from tests.contract.test_torch_compile import make, randn
from torch._dynamo.utils import counters
make(sys.argv[1]).silu_and_mul(randn(3, 16))
print(json.dumps([counters["inductor"]["fxgraph_cache_hit"],
                  counters["inductor"]["fxgraph_cache_miss"]]))
"""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def make(cache_dir: str | None = None) -> Ops:
    from glowplug.plugins.ops.torch_compile_runtime import TorchCompileOps

    return TorchCompileOps(
        torch_compile.TorchCompileOptions(max_batch=4, cache_dir=cache_dir), PLAN, Worker()
    )


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def programs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_compiled_ops_equal_the_reference_at_every_number_of_tokens() -> None:
    ops, weight, bias = make(), randn(24, seed=2), randn(16, seed=3)
    before = programs()
    with torch.inference_mode():
        for tokens in (3, 1, 8, 2, 9, 40):  # up to 8 are compiled
            x, residual, logits = (
                randn(tokens, 24),
                randn(tokens, 24, seed=1),
                randn(tokens, 16, seed=tokens),
            )
            torch.testing.assert_close(
                ops.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6)
            )
            normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
            torch.testing.assert_close(total, x + residual)
            torch.testing.assert_close(normed, norm.rms_norm_reference(total, weight, 1e-6))
            torch.testing.assert_close(ops.silu_and_mul(x), activation.silu_and_mul(x))
            weights, ids = ops.topk_sigmoid(logits, bias, 4, 4, 2, True, 2.5)
            wanted, chosen = routing.topk_sigmoid_reference(logits, bias, 4, 4, 2, True, 2.5)
            assert torch.equal(ids.sort().values, chosen.sort().values)
            torch.testing.assert_close(
                weights.gather(1, ids.argsort()), wanted.gather(1, chosen.argsort())
            )
            if tokens == 3:
                made = programs() - before
    assert made == 2 * 4, "one program for a token and one for several, of each op"
    assert programs() - before == made, "a new number of tokens compiles nothing"


def test_another_size_gets_programs_of_its_own() -> None:
    ops = make()
    with torch.inference_mode():
        for size in (8, 12):
            before = programs()
            for tokens in (2, 1, 5, 2):
                wide = randn(tokens, 3 * size, seed=tokens)
                part, weight = wide[:, size : 2 * size], randn(size, seed=9)
                torch.testing.assert_close(
                    ops.rms_norm(part, weight, 1e-5), norm.rms_norm_reference(part, weight, 1e-5)
                )
            assert programs() == before + 2


def test_the_second_start_finds_what_the_first_compiled(tmp_path: Path) -> None:
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", STARTS, str(tmp_path)],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
            ).stdout
        )
        for _ in range(2)
    ]
    assert found == [[0, 2], [2, 0]]
    assert any(tmp_path.iterdir())


def test_refused_without_a_compiler() -> None:
    def reasons(device: str, cxx: str, **packages: str) -> list[str]:
        facts = SimpleNamespace(
            software=SimpleNamespace(cxx=cxx, packages=packages), hardware=HardwareFacts()
        )
        context: Any = SimpleNamespace(facts=facts, values=Decided(device=device))
        return [refusal.reason for refusal in torch_compile.check_torch_compile(context)]

    assert not reasons("cpu", "/usr/bin/g++") and not reasons("cuda", "", triton="3.6.0")
    assert reasons("cpu", "", triton="3.6.0") == [
        "torch.compile needs a C++ compiler on a CPU, and none is installed"
    ]
    assert reasons("cuda", "/usr/bin/g++") == ["torch.compile needs triton on CUDA (not installed)"]
