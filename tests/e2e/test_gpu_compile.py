"""Compiled small kernels, graphs, experts, block FP8 and next-token drafts together give the tokens
of eager steps, and nothing is compiled once the engine serves.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from glowplug import LLM
from glowplug.core.protocols import Worker
from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.plugins.ops.torch_compile import TorchCompileOptions
from tests.e2e.test_gpu_graphs import SIZES, engine, folder_of, lengths, prompts, runner_of, tokens

pytestmark = pytest.mark.gpu
COMPILED = {"ops": {"use": "torch_compile", "max_batch": 4}}
DRAFTING = {"speculative": {"use": "nextn", "adaptive": False, "steps": 2}}


def programs() -> int:
    return int(counters["stats"]["unique_graphs"])


def served(llm: LLM, counts: tuple[int, ...]) -> list[list[list[int]]]:
    """Return the tokens; compiling during the run is an error."""
    before = programs()
    found = [tokens(llm, count) for count in counts]
    assert programs() == before, "a step compiled something"
    return found


@pytest.mark.parametrize(
    ("name", "more"),
    [("v2", {}), ("v3", {}), ("v3", DRAFTING), ("llama", {})],
    ids=["v2", "v3", "v3_nextn", "llama"],
)
def test_compiled_steps_give_the_eager_tokens(
    tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    """Batches up to the limit are compiled, larger ones are not; both are captured."""
    folder, counts = folder_of(tmp_path, name), (1, 2, 3, 5, 9)
    with engine(folder, graphs={"use": "eager"}) as llm:
        eager = [tokens(llm, count) for count in counts]
    for graphs in ({"use": "eager"}, {"use": "cuda_graph", "batch_sizes": SIZES}):
        before = programs()
        with engine(folder, **COMPILED, **more, graphs=graphs) as llm:
            assert served(llm, counts) == eager
            if graphs["use"] == "cuda_graph":
                assert [
                    sorted(graphs) for graphs in runner_of(llm).graphs._decode_graphs.values()
                ] == [SIZES]
        assert programs() > before


@pytest.mark.parametrize("more", [{}, DRAFTING], ids=["plain", "nextn"])
def test_block_fp8_is_compiled_and_captured(tmp_path: Path, more: dict[str, Any]) -> None:
    """Rounding depends on the batch's shape here, so only the first tokens of one row are
    compared.
    """
    folder, found = folder_of(tmp_path, "v3_fp8"), []
    for tried in (
        {"graphs": {"use": "eager"}},
        {**COMPILED, **more, "graphs": {"use": "cuda_graph", "batch_sizes": [1, 4]}},
    ):
        with engine(folder, dtype="bfloat16", **tried) as llm:
            found.append([ids[:2] for ids in served(llm, (1,))[0]])
            answers = llm.generate(prompts(3), lengths(3))
            assert [len(one.token_ids) for one in answers] == [8, 11, 14]
    assert found[0] == found[1]


def test_what_was_never_run_before_a_capture_is_captured_uncompiled() -> None:
    from glowplug.plugins.ops.torch_compile_runtime import TorchCompileOps

    plan: Any = SimpleNamespace(sizes=SimpleNamespace(width=1))
    ops = TorchCompileOps(TorchCompileOptions(), plan, Worker(device="cuda"))
    x, weight = torch.zeros(4, 96, device="cuda"), torch.randn(96, device="cuda")
    # the first call loads and compiles; this one does not count
    ops.rms_norm(x[:, :64], weight[:64], 1e-6)
    before, graph = programs(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.rms_norm(x, weight, 1e-6)
    for seed in (1, 2):
        x.copy_(torch.randn(4, 96, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(found, rms_norm_reference(x, weight, 1e-6))
    assert programs() == before
