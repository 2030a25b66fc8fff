"""Graph runners and executors pass the suites of their slots, in small engines."""

from __future__ import annotations

from typing import Any

import pytest

from glowplug.core.plan.plan import EnginePlan
from glowplug.plugins.executors.multiprocess import MultiprocessOptions
from glowplug.plugins.executors.multiprocess_runtime import MultiprocessExecutor
from tests.mutants import whole_engines


class TestReplaying(whole_engines.Graphs):
    speculative = {"use": "ngram", "steps": 2}


@pytest.mark.gpu
class TestCudaGraph(whole_engines.Graphs):
    graphs = {"use": "cuda_graph"}

    def config(self) -> dict[str, Any]:
        return {**super().config(), "device": "cuda", "dtype": "bfloat16"}


class TestInline(whole_engines.Executors):
    pass


@pytest.mark.slow
class TestMultiprocess(whole_engines.Executors):
    seconds = 60.0

    def make(self, plan: EnginePlan) -> Any:
        return MultiprocessExecutor(MultiprocessOptions(), plan, None)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "executor": {"use": "multiprocess"}}
