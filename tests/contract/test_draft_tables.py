"""The page tables that latent attention by libraries keeps for draft passes: their bytes equal the
component's figure, in one buffer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.offers import AttentionOffers
from glowplug.core.protocols import AttentionBackend, Limits, Worker
from glowplug.core.testing.harness.build import built_in
from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.plugins.attention.mla.flashinfer import WORKSPACE_BYTES
from tests.contract import fake_flashinfer, fake_sgl_kernel
from tests.contract.gpu_mla import ProjectedSuite, drafting


def component(name: str) -> Component:
    """Return the built-in attention backend ``name``."""
    found = built_in().find("attention", name)
    assert found is not None
    return found.component


BACKENDS = ("fa3_mla", "flashmla", "flashinfer_mla")
RUNTIMES = [component(name).factory.partition(":")[0] for name in BACKENDS]
ROWS, CONTEXT, PAGE, WIDTH = 17, 1000, 64, 2


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    """The fakes for this module; runtimes that imported them are unloaded with them."""
    before = {name: sys.modules.pop(name, None) for name in RUNTIMES}
    with pytest.MonkeyPatch.context() as patch:
        for name, made in {**fake_sgl_kernel.modules(), **fake_flashinfer.modules()}.items():
            patch.setitem(sys.modules, name, made)
        patch.setattr(torch.cuda, "Event", fake_flashinfer.Event)
        yield
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


class OfDrafts(ProjectedSuite):
    """The suite of every backend with memory reserved for drafts."""

    name, tree = "", False
    page_sizes, page_size, max_width = (64,), 64, 2
    nope, rope, value, lora = 16, 64, 8, 512

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        drafts = plan.sizes.draft_layers
        plan = replace(plan, sizes=replace(plan.sizes, width=WIDTH))
        plan = plan if drafts else drafting(plan)
        options = self.component().options()
        module, _, name = self.component().factory.partition(":")
        backend: AttentionBackend = getattr(importlib.import_module(module), name)(
            options, plan, worker
        )
        return backend

    def component(self) -> Component:
        return component(self.name)

    def test_sizes_and_passes_share_the_reserved_bytes(self) -> None:
        backend, offers = self.backend(PAGE), self.component().offers
        assert isinstance(offers, AttentionOffers) and offers.reserves is not None
        world = make_world([Row(3, 1)], PAGE, 0)
        world.fill("kv", (self.lora + self.rope,), torch.Generator().manual_seed(0))
        limits = Limits(
            rows=ROWS, context=CONTEXT, num_pages=9, width=WIDTH, vocab=8, kv=(world.pools,)
        )
        backend.reserve(limits)
        backend.reserve(limits)
        for rows in (16, 8, 3, 1):
            batch = make_world([Row(2, 1) for _ in range(rows)], PAGE, rows).batch
            batch.page_table = torch.zeros(rows, -(-CONTEXT // PAGE), dtype=torch.int32)
            batch.first_key = 1
            for number in range(3):
                backend.plan_step(batch, (rows, number))
            backend.plan_step(batch, None)
        said = offers.reserves(DecodingRows(ROWS, CONTEXT, PAGE, WIDTH, self.heads, True))
        held = backend._buffers.nbytes  # type: ignore[attr-defined]
        assert held + (WORKSPACE_BYTES if self.name == "flashinfer_mla" else 0) == said
        assert held == ROWS * -(-CONTEXT // PAGE) * PAGE * 4

    def test_a_pass_of_a_draft_reads_its_slots(self) -> None:
        """A batch of another size runs first, then this one: they use the buffer in turn."""
        for seed, lengths in enumerate(((30, 1, 97), (5, 200), (64, 63, 65, 2))):
            generator, backend = torch.Generator().manual_seed(seed), self.backend(PAGE)
            world = make_world([Row(n + 2, 1) for n in lengths], PAGE, seed)
            world.batch.first_key = 1
            layer, args = self.layer(generator), self.arguments(world, generator)
            expected = self.expected(world, layer, args)
            self.close(self.step(backend, world, layer, args), expected)
            assert backend._buffers.nbytes == len(lengths) * 4096 * 4  # type: ignore[attr-defined]


class TestFa3(OfDrafts):
    name = "fa3_mla"


class TestFlashMla(OfDrafts):
    name = "flashmla"


class TestFlashInfer(OfDrafts):
    name = "flashinfer_mla"


del OfDrafts
