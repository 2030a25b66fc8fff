"""Conformance test of attention that plans decoding rows on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.core.testing.suites.parts.attention_trees import TreeSuite

#: methods of a tensor that give its values to the host
READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")


class Absent:
    """An array of the host that nothing may read."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the plan reads an array of the host ({name})")

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("the plan reads an array of the host")


@contextmanager
def unread_tensors() -> Iterator[None]:
    """Have every read of a tensor's values on the host raise an ``AssertionError``."""
    with ExitStack() as stack:
        for name in READS:
            refused = mock.Mock(side_effect=AssertionError(f"the plan reads a tensor ({name})"))
            stack.enter_context(mock.patch.object(torch.Tensor, name, refused))
        yield


class PlanSuite(TreeSuite):
    """A test of backends that have ``plans_on_device``."""

    def test_plans_on_the_device_need_no_host(self) -> None:
        """Such a plan follows lengths and page table on the device, and can be captured."""
        claims = getattr(self.backend(self.page_size), "plans_on_device", None)
        found = [key for key in (0, 1) if claims is not None and claims(key)]
        kept = [key for key in found if self.first_key or not key]
        if not kept:
            pytest.skip("this backend plans on the host")
        for first_key in kept:
            self.check_plan(first_key)

    def check_plan(self, first_key: int) -> None:
        """Compare a step that is planned on the device with the definition."""
        generator = torch.Generator().manual_seed(first_key)
        world = make_world([Row(n + 1, 1) for n in (4, 16, 33)], self.page_size, 8)
        world.batch.first_key = first_key
        layer = self.layer(generator)
        args = self.arguments(world, generator)
        world.move(self.device, self.cached)
        backend = self.backend(self.page_size)
        backend.reserve(world.limits())
        absent: Any = Absent()
        world.batch.kv_lens = world.batch.pages = absent
        with unread_tensors():
            backend.plan_step(world.batch, "a graph")
        self.close(self.run(backend, layer, args), self.expected(world, layer, args))
