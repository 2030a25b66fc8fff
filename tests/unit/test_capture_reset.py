"""A closed runner frees its graphs even if reference cycles hold them, because NCCL closes no
communicator while a graph holds one of its operations.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glowplug.plugins.graphs import cuda_graph_runtime
from glowplug.plugins.graphs.capture.recorder import CudaRecorder
from glowplug.plugins.graphs.cuda_graph import CudaGraphOptions
from glowplug.plugins.graphs.cuda_graph_runtime import CudaGraph


class Graph:
    """A stand-in for a CUDA graph, which may be part of a reference cycle."""

    def __init__(self) -> None:
        self.freed = False
        self.holder: Any = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        pass

    def reset(self) -> None:
        self.freed = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return CudaRecorder(torch.device("cuda", 0))


def test_a_runner_frees_its_graphs(recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph_runtime, "CudaRecorder", lambda device: recorder)
    sizes = SimpleNamespace(
        step_shapes=(), short_rows=(), pass_tokens=(), extend_tokens=(), groups=1, max_running=1
    )
    plan: Any = SimpleNamespace(sizes=sizes, mesh={}, ranks=1)
    worker: Any = SimpleNamespace(device="cpu")
    runner = CudaGraph(CudaGraphOptions(), plan, worker)
    steps: Any = SimpleNamespace(device="cpu", draft_extend=SimpleNamespace(work=None))
    runner.capture(steps, lambda done, total: None)
    graph: Any = recorder.begin()
    graph.holder = graph  # counting references alone does not free it
    runner.close()
    assert graph.freed
    again: Any = recorder.begin()
    runner.close()
    assert not again.freed
