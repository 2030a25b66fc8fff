"""``torch_mla`` passes the attention slot's suite: absorbed and not, in one piece and in many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.core.testing.suites.attention import MlaSuite
from glowplug.plugins.attention.mla.torch import TorchMlaOptions
from glowplug.plugins.attention.mla.torch_runtime import TorchMla


class TestAbsorbed(MlaSuite):
    absorb = True

    def make(self, plan: EnginePlan, worker: Worker) -> TorchMla:
        plan = replace(plan, kv_dtype=str(self.dtype).removeprefix("torch."))
        return TorchMla(TorchMlaOptions(absorb=self.absorb), plan, worker)


class TestNaive(TestAbsorbed):
    absorb = False


class TestInPieces(TestAbsorbed):
    """At these lengths groups are already split and prefixes attended in pieces."""

    def make(self, plan: EnginePlan, worker: Worker) -> TorchMla:
        made = super().make(plan, worker)
        made._limits = replace(made._limits, decode_keys=97, keys=23, queries=60)
        return made


class TestNaiveInPieces(TestInPieces):
    absorb = False


class TestBfloat16(TestInPieces):
    dtype, error = torch.bfloat16, 3e-2


@pytest.mark.gpu
class TestCuda(TestInPieces):
    device, error = "cuda", 5e-3


@pytest.mark.gpu
class TestCudaBfloat16(TestAbsorbed):
    device, dtype, error = "cuda", torch.bfloat16, 3e-2


def test_a_tree_of_one_row_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that numpy attends to hold trees; a mask may name more keys than its row has."""
    suite, backend = TestAbsorbed(), TestAbsorbed().backend(16)
    monkeypatch.setattr(suite, "backend", lambda page_size: backend)
    for length, span, first_key in ((5, 0, 0), (9, 8, 0), (9, 9, 1), (33, 5, 1), (70, 64, 0)):
        suite.check_trees([Row(length, 3)], 16, span, first_key)
        assert backend._row is not None and backend._row.hidden is not None


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("first_key", [0, 1])
def test_one_row_in_host_memory(width: int, first_key: int) -> None:
    """A single decoding row in shuffled and in neighbouring pages, with and without a gap before
    its first key.
    """
    suite, found = TestAbsorbed(), set()
    for length in (width + 1, 16, 17, 33, 48):
        for shift in (False, True):
            generator = torch.Generator().manual_seed(length)
            world = make_world([Row(length, width)], 16, length)
            if shift:
                world.batch.pages[:] = range(1, 1 + world.batch.pages.shape[1])
                world.batch.kv_slots = world.kv_slots_of(0)[length - width :]
            world.batch.first_key = first_key
            layer, args = suite.layer(generator), suite.arguments(world, generator)
            backend = suite.backend(16)
            suite.close(suite.step(backend, world, layer, args), suite.expected(world, layer, args))
            assert backend._row is not None
            found.add(type(backend._row.pages))
            for name in suite.entries:
                stored = world.pools[name][world.kv_slots_of(0)[first_key:]]
                assert torch.equal(stored, world.cached[name][0][first_key:])
    assert found == {slice, np.ndarray}
