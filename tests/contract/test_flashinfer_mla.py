"""FlashInfer's latent-attention backend on the CPU, with a library that follows its plans."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.testing.harness.paged_world import Row, World, make_world
from glowplug.plugins.attention.mla.flashinfer import FlashInferMlaOptions
from tests.contract import fake_flashinfer
from tests.contract.fake_flashinfer import Event, MlaWrapper
from tests.contract.gpu_mla import ProjectedSuite

RUNTIME = "glowplug.plugins.attention.mla.flashinfer_runtime"


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    """The fake for this module; the runtime that imported it is unloaded with it."""
    before = sys.modules.pop(RUNTIME, None)
    with pytest.MonkeyPatch.context() as patch:
        for name, made in fake_flashinfer.modules().items():
            patch.setitem(sys.modules, name, made)
        patch.setattr(torch.cuda, "Event", Event)
        yield
    sys.modules.pop(RUNTIME, None)
    if before is not None:
        sys.modules[RUNTIME] = before


@pytest.fixture(autouse=True)
def _nothing_yet() -> None:
    MlaWrapper.given.clear()
    Event.waits.clear()


class Suite(ProjectedSuite):
    tree = False
    wide = 1  #: tokens of a decoding row in the plan

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        made = importlib.import_module(RUNTIME).FlashInferMla
        plan = replace(plan, sizes=replace(plan.sizes, width=self.wide))
        backend: AttentionBackend = made(FlashInferMlaOptions(), plan, worker)
        return backend

    def world(
        self, seed: int, width: int, first_key: int = 0, lengths: tuple[int, ...] = (30, 1, 97)
    ) -> World:
        world = make_world(
            [Row(n + width + first_key, width) for n in lengths],
            self.page_size,
            seed,
            spare_columns=9,
        )
        world.batch.first_key = first_key
        return world


class TestFlashInfer(Suite):
    """Work items of 32 keys and 2 tokens."""


class TestWhatTheLibraryIsGiven(Suite):
    wide = 3

    def test_a_chain_of_drafts(self) -> None:
        generator, world = torch.Generator().manual_seed(0), self.world(0, 3)
        args = self.arguments(world, generator)
        self.step(self.backend(16), world, self.layer(generator), args)
        (given,) = MlaWrapper.given
        columns = world.batch.page_table.shape[1]
        assert (
            given["qo_indptr"] == [0, 3, 6, 9]
            and given["causal"] is True
            and given["page_size"] == 16
        )
        assert given["kv_indptr"] == [0, columns, 2 * columns, 3 * columns]
        assert given["kv_len_arr"] == [33, 4, 100]
        assert torch.equal(given["kv_indices"], world.batch.page_table.reshape(-1))

    def test_a_drafts_pass_goes_by_slots_behind_the_first(self) -> None:
        generator, world = torch.Generator().manual_seed(0), self.world(0, 1, first_key=1)
        args = self.arguments(world, generator)
        self.step(self.backend(16), world, self.layer(generator), args)
        (given,) = MlaWrapper.given
        each = world.batch.page_table.shape[1] * 16 - 1
        assert (
            given["page_size"] == 1
            and given["causal"] is False
            and given["kv_len_arr"] == [31, 2, 98]
        )
        assert given["kv_indptr"] == [0, each, 2 * each, 3 * each]
        for row, count in enumerate((31, 2, 98)):
            kv_slots = given["kv_indices"][row * each :][:count]
            assert torch.equal(kv_slots.long(), world.kv_slots_of(row)[1 : count + 1])

    def test_a_plain_step_leaves_plans_as_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In an engine that never drafts; a step without drafts of another one is not plain."""
        self.wide = 1
        backend, generator, world = (
            self.backend(16),
            torch.Generator().manual_seed(0),
            self.world(0, 1),
        )
        args = self.arguments(world, generator)
        monkeypatch.setattr(sys.modules[RUNTIME], "set_lengths", lambda *given: pytest.fail("set"))
        layer = self.layer(generator)
        self.close(self.step(backend, world, layer, args), self.expected(world, layer, args))
        assert MlaWrapper.given[0]["causal"] is False

    @pytest.mark.parametrize("first_key", [0, 1])
    @pytest.mark.parametrize("width", [1, 2, 3, 4])
    def test_bounds_far_beyond_the_lengths(self, width: int, first_key: int) -> None:
        """Work items after a row's end have no keys, and padding rows have none at all."""
        for seed in range(6):
            generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
            world = self.world(
                seed, width, first_key, tuple(int(n) for n in rng.integers(0, 130, 5)) + (3,)
            )
            layer, args = self.layer(generator), self.arguments(world, generator)
            expected = self.expected(world, layer, args)
            world.batch.kv_lens = world.batch.kv_lens + rng.integers(
                0, 9 * self.page_size, 6
            ).astype(np.int32)
            world.batch.kv_lens_device[-1] = 0
            world.batch.kv_slots[-width:] = 0
            got = self.step(self.backend(self.page_size), world, layer, args)
            assert torch.isfinite(got).all()
            self.close(got[:-width], expected[:-width])
            assert max(MlaWrapper.given[-1]["kv_len_arr"]) > max(
                world.batch.kv_lens_device.tolist()
            )

    @pytest.mark.parametrize(("width", "first_key"), [(1, 0), (3, 0), (1, 1)])
    def test_a_slot_keeps_its_wrapper_and_its_memory(self, width: int, first_key: int) -> None:
        """Pages and lengths of another step are written to the memory that the captured kernels
        read.
        """
        generator, backend, graph = torch.Generator().manual_seed(1), self.backend(16), object()
        layer, static = self.layer(generator), self.world(1, width, first_key)
        args = self.arguments(static, generator)
        backend.reserve(static.limits())
        for lengths in ((30, 1, 97), (5, 61, 44)):
            world = self.world(2, width, first_key, lengths)
            args = self.arguments(world, generator)
            for name in ("page_table", "kv_lens_device", "kv_slots"):
                target, new = getattr(static.batch, name), getattr(world.batch, name)
                target.zero_()
                target[tuple(slice(size) for size in new.shape)] = new[
                    tuple(slice(size) for size in target.shape)
                ]
            static.batch.kv_lens = world.batch.kv_lens + np.int32(2 * (width > 1 or first_key))
            backend.reserve(world.limits())
            backend.plan_step(static.batch, graph)
            self.close(self.attend(backend, layer)(*args), self.expected(world, layer, args))
        assert MlaWrapper.given[0]["wrapper"] is MlaWrapper.given[1]["wrapper"]

    def test_no_plan_waits_for_one_of_its_own_step(self) -> None:
        """Without graphs: as many wrappers as a step has plans, so that a plan waits for the step
        before at most.
        """
        backend, generator = self.backend(16), torch.Generator().manual_seed(0)
        for seed in range(2):
            for width, first_key in ((1, 1), (1, 1), (3, 0)):
                world = self.world(seed, width, first_key)
                layer, args = self.layer(generator), self.arguments(world, generator)
                self.close(
                    self.step(backend, world, layer, args), self.expected(world, layer, args)
                )
        wrappers = [id(given["wrapper"]) for given in MlaWrapper.given]
        assert len(set(wrappers[:3])) == 3 and wrappers[3:] == wrappers[:3]
        assert Event.waits[3:] == Event.waits[:3] and len(set(map(id, Event.waits))) == 3

    @pytest.mark.parametrize("changed", ["fewer", "moved", "renamed"])
    def test_another_layout_is_an_error_that_names_the_version(
        self, changed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = MlaWrapper.plan

        def other(self: Any, *given: Any) -> None:
            plan(self, *given)
            if changed == "fewer":
                self._plan_info.pop()
            elif changed == "moved":
                self._plan_info[11], self._plan_info[10] = self._plan_info[10], self._plan_info[11]
            else:
                del self._pin_memory_int_workspace_buffer

        monkeypatch.setattr(MlaWrapper, "plan", other)
        generator, world = torch.Generator().manual_seed(0), self.world(0, 2)
        args = self.arguments(world, generator)
        with pytest.raises(
            RuntimeError, match=r"flashinfer-python 0\.0\.fake .* 0\.6\.11"
        ) as caught:
            self.step(self.backend(16), world, self.layer(generator), args)
        assert "Fix:" in str(caught.value)
