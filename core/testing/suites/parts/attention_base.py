"""Base of the conformance suites of the ``attention`` slot: tests of every kind of backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.step.kv_pool import TORCH_DTYPES
from glowplug.core.testing.harness.paged_world import Row, World, make_world, random_rows
from glowplug.core.testing.harness.plans import bare_plan

LAYERS = 3  #: layers of a step through several: two of the target and one of a draft


@dataclass
class MlaCase:
    """An ``MlaLayer`` of odd sizes with random weights."""

    w_uk: Tensor
    w_uv: Tensor
    index: int = 0
    heads: int = 3
    nope_dim: int = 8
    rope_dim: int = 4
    v_dim: int = 6
    lora_rank: int = 16
    scale: float = 0.37
    kv_stored: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.w_kv = torch.cat((self.w_uk, self.w_uv.transpose(1, 2)), dim=1)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("mc,hnc->mhn", latent, self.w_uk), torch.einsum(
            "mc,hcv->mhv", latent, self.w_uv
        )


@dataclass
class MhaCase:
    """An ``MhaLayer`` of grouped-query attention."""

    heads: int = 6
    kv_heads: int = 2
    index: int = 0
    head_dim: int = 8
    scale: float = 0.41


class AttentionSuite:
    """Tests of both MLA and MHA backends.

    Override ``device``, ``dtype`` or ``error`` (the largest absolute error) as needed.
    """

    device = "cpu"
    dtype = torch.float32
    error = 2e-6
    kv_dtype: torch.dtype | None = None  #: dtype of the cache; None: ``dtype``
    page_sizes: tuple[int, ...] = (1, 7, 16)
    page_size = 16  #: page size of the other tests
    max_width = 4
    first_key = True  #: ``AttentionOffers.first_key``
    entries: dict[str, tuple[int, ...]]
    queries: tuple[tuple[int, ...], ...]

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        """Return the backend for ``plan``."""
        raise NotImplementedError

    # ---- defined by each kind --------------------------------------------------------------------

    def facts(self) -> ModelFacts:
        raise NotImplementedError

    def layer(self, generator: torch.Generator) -> MlaCase | MhaCase:
        raise NotImplementedError

    def attend(self, backend: AttentionBackend, layer: MlaCase | MhaCase) -> Callable[..., Tensor]:
        raise NotImplementedError

    def definition(
        self, queries: list[Tensor], history: list[Tensor], layer: MlaCase | MhaCase
    ) -> Tensor:
        """Compute the attention of one row in float64.

        Args:
            queries: arguments of the backend for the row's T tokens, each [T, ...].
            history: cache entries of the row's M tokens, each [M, ...].
            layer: the layer.

        Returns:
            [T, H, V].
        """
        raise NotImplementedError

    # ---- driving ---------------------------------------------------------------------------------

    @property
    def cached(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def cached_name(self) -> str:
        return next(name for name, kind in TORCH_DTYPES.items() if kind is self.cached)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded to the compute dtype, so that only the backend's error is measured."""
        return x.to(self.dtype).float()

    def backend(self, page_size: int) -> AttentionBackend:
        plan = bare_plan(page_size=page_size)
        plan = replace(
            plan,
            facts=replace(plan.facts, model=self.facts()),
            device=self.device,
            kv_dtype=self.cached_name,
        )
        return self.make(plan, Worker(device=self.device, dtype=self.dtype))

    def arguments(self, world: World, generator: torch.Generator) -> list[Tensor]:
        """Fill the world's cache; return random queries and the step's cache entries."""
        kept = [
            world.fill(name, shape, generator, self.cached) for name, shape in self.entries.items()
        ]
        tokens = world.batch.num_tokens
        return [
            *(
                self.rounded(torch.randn(tokens, *shape, generator=generator))
                for shape in self.queries
            ),
            *kept,
        ]

    def step(
        self, backend: AttentionBackend, world: World, layer: MlaCase | MhaCase, args: list[Tensor]
    ) -> Tensor:
        world.move(self.device, self.cached)
        backend.reserve(world.limits())
        backend.plan_step(world.batch, None)
        return self.attend(backend, layer)(*(x.to(self.device, self.dtype) for x in args)).cpu()

    def expected(self, world: World, layer: MlaCase | MhaCase, args: list[Tensor]) -> Tensor:
        parts = []
        at = 0
        for index, row in enumerate(world.rows):
            queries = [x[at : at + row.queries] for x in args[: len(self.queries)]]
            history = [world.cached[name][index][world.batch.first_key :] for name in self.entries]
            parts.append(self.definition(queries, history, layer))
            at += row.queries
        return torch.cat(parts).flatten(1)

    def close(self, got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got.double(), expected, rtol=5 * self.error, atol=self.error)

    # ---- tests -----------------------------------------------------------------------------------

    def test_random_layouts(self) -> None:
        """Decoding rows of every width mix with fresh and continued chunks at page edges."""
        for page_size in self.page_sizes:
            for seed in range(2 * self.max_width):
                generator = torch.Generator().manual_seed(seed)
                rng = np.random.default_rng(seed * 31 + page_size)
                rows = random_rows(rng, page_size, width=1 + seed % self.max_width)
                world = make_world(rows, page_size, seed, spare_columns=seed % 3)
                layer = self.layer(generator)
                args = self.arguments(world, generator)
                self.close(
                    self.step(self.backend(page_size), world, layer, args),
                    self.expected(world, layer, args),
                )

    def test_a_first_key_is_where_attention_begins(self) -> None:
        """Position 0 of a draft's cache has no entry and is never read; it holds NaN here."""
        if not self.first_key:
            pytest.skip("this backend reads every position")
        for seed in range(2 * self.max_width):
            generator = torch.Generator().manual_seed(seed)
            rng = np.random.default_rng(seed * 17)
            page_size = self.page_sizes[seed % len(self.page_sizes)]
            rows = [
                Row(row.length + 1, row.queries, row.prefill)
                for row in random_rows(rng, page_size, width=1 + seed % self.max_width)
            ]
            world = make_world(
                rows[-1:] if seed == 1 else rows, page_size, seed, spare_columns=seed % 3
            )
            world.batch.first_key = 1
            layer = self.layer(generator)
            args = self.arguments(world, generator)
            self.close(
                self.step(self.backend(page_size), world, layer, args),
                self.expected(world, layer, args),
            )

    def test_the_step_is_stored(self) -> None:
        generator = torch.Generator().manual_seed(5)
        world = make_world([Row(17, 1), Row(16, 1), Row(33, 20, prefill=True)], self.page_size, 5)
        args = self.arguments(world, generator)
        self.step(self.backend(self.page_size), world, self.layer(generator), args)
        for name in self.entries:
            for index in range(len(world.rows)):
                stored = world.pools[name].cpu()[world.kv_slots_of(index)]
                assert torch.equal(stored.float(), world.cached[name][index]), (name, index)

    def test_chunked_equals_whole(self) -> None:
        """A prompt in chunks that end on either side of a page edge gives the same result."""
        generator = torch.Generator().manual_seed(3)
        layer = self.layer(generator)
        whole = make_world([Row(61, 61, prefill=True)], self.page_size, 11)
        args = self.arguments(whole, generator)
        expected = self.expected(whole, layer, args)
        kv_slots = whole.num_pages * self.page_size
        for ends in ([61], [15, 31, 48, 61], [1, 32, 61], [33, 61]):
            backend = self.backend(self.page_size)
            outs = []
            pools = {name: torch.zeros(kv_slots, *shape) for name, shape in self.entries.items()}
            for start, end in pairwise([0, *ends]):
                world = self._continued(whole, start, end, pools)
                outs.append(self.step(backend, world, layer, [x[start:end] for x in args]))
                pools = world.pools
            self.close(torch.cat(outs), expected)

    @staticmethod
    def _continued(whole: World, start: int, end: int, pools: dict[str, Tensor]) -> World:
        """Return the step for tokens ``start`` to ``end`` of ``whole``'s row, in its pages."""
        world = make_world([Row(end, end - start, prefill=True)], whole.page_size, 0)
        world.num_pages = whole.num_pages
        world.pools = pools
        world.batch.pages = whole.batch.pages[:, : world.batch.pages.shape[1]].copy()
        world.batch.page_table = torch.from_numpy(world.batch.pages)
        world.batch.kv_slots = world.kv_slots_of(0)[start:]
        return world

    def test_alone_equals_in_a_batch(self) -> None:
        """Other rows of the step change nothing beyond rounding."""
        generator = torch.Generator().manual_seed(9)
        rows = [Row(n, 1) for n in (1, 5, 16, 17, 31, 32, 33, 64)]
        layer = self.layer(generator)
        backend = self.backend(self.page_size)
        world = make_world(rows, self.page_size, 9)
        args = self.arguments(world, generator)
        together = self.step(backend, world, layer, args)
        for index, row in enumerate(rows):
            one = slice(index, index + 1)
            alone = make_world([row], self.page_size, 1)
            alone.num_pages = world.num_pages
            alone.pools = world.pools
            alone.batch.page_table = world.batch.page_table[one]
            alone.batch.kv_slots = world.batch.kv_slots[one]
            got = self.step(backend, alone, layer, [x[one] for x in args])
            torch.testing.assert_close(got, together[one], rtol=0, atol=self.error)

    def test_padded_and_idle_rows_are_harmless(self) -> None:
        """A padding row (length 0, scratch pages) must not give NaN; an idle step has no tokens."""
        generator = torch.Generator().manual_seed(2)
        layer = self.layer(generator)
        backend = self.backend(self.page_size)
        world = make_world([Row(20, 1), Row(1, 1)], self.page_size, 2)
        args = self.arguments(world, generator)
        world.batch.page_table[1] = 0
        world.batch.kv_lens_device[1] = 0
        world.batch.kv_slots[1] = 0
        out = self.step(backend, world, layer, args)
        assert torch.isfinite(out).all()
        self.close(out[:1], self.expected(world, layer, args)[:1])
        idle = make_world([], self.page_size, 2)
        idle.pools = world.pools
        assert self.step(backend, idle, layer, [x[:0] for x in args]).shape == (0, out.shape[1])

    def test_lengths_known_on_the_device_only(self) -> None:
        """``kv_lens`` may be an upper bound; ``kv_lens_device`` has the lengths."""
        generator = torch.Generator().manual_seed(6)
        width = min(2, self.max_width)
        layer = self.layer(generator)
        world = make_world([Row(30, width), Row(12, width)], self.page_size, 4)
        args = self.arguments(world, generator)
        world.batch.kv_lens = world.batch.kv_lens + np.int32(2)
        self.close(
            self.step(self.backend(self.page_size), world, layer, args),
            self.expected(world, layer, args),
        )

    def run(
        self, backend: AttentionBackend, layer: MlaCase | MhaCase, args: list[Tensor]
    ) -> Tensor:
        """Run a layer in the planned step."""
        return self.attend(backend, layer)(*(x.to(self.device, self.dtype) for x in args)).cpu()

    def planned(self, worlds: list[World]) -> AttentionBackend:
        """Return a backend over one cache per world, which has planned their common step."""
        for world in worlds:
            world.move(self.device, self.cached)
        backend = self.backend(self.page_size)
        backend.reserve(worlds[0].limits(tuple(world.pools for world in worlds)))
        backend.plan_step(worlds[0].batch, None)
        return backend

    def check_stored(self, world: World, where: str) -> None:
        """Check that the cache holds the entries of every row's tokens."""
        for name in self.entries:
            for index in range(len(world.rows)):
                stored = world.pools[name].cpu()[world.kv_slots_of(index)]
                assert torch.equal(stored.float(), world.cached[name][index]), (
                    f"{where} has other entries {name!r} in row {index}"
                )

    def test_each_layer_has_its_own_cache(self) -> None:
        """A step runs through the target's layers and those of a draft, which come after them."""
        generator = torch.Generator().manual_seed(12)
        rows = [Row(33, 1), Row(17, 1), Row(40, 9, prefill=True)]
        worlds = [make_world(rows, self.page_size, 3) for _ in range(LAYERS)]
        layers = [replace(self.layer(generator), index=index) for index in range(LAYERS)]
        args = [self.arguments(world, generator) for world in worlds]
        backend = self.planned(worlds)
        outs = [self.run(backend, *pair) for pair in zip(layers, args, strict=True)]
        for index, world in enumerate(worlds):
            self.close(outs[index], self.expected(world, layers[index], args[index]))
            self.check_stored(world, f"layer {index}")

    def test_a_second_pool_replaces_the_first(self) -> None:
        """``reserve`` is called again after memory was measured; the first pool is gone."""
        generator = torch.Generator().manual_seed(13)
        rows = [Row(20, 1), Row(9, 1)]
        layer = self.layer(generator)
        backend = self.backend(self.page_size)
        first = make_world(rows, self.page_size, 3)
        self.step(backend, first, layer, self.arguments(first, generator))
        second = make_world(rows, self.page_size, 5)
        args = self.arguments(second, generator)
        self.close(self.step(backend, second, layer, args), self.expected(second, layer, args))

    def test_the_layout_has_layers_for_a_draft(self) -> None:
        plan = bare_plan(page_size=self.page_size)
        for drafts in (0, 1, 2):
            plan = replace(plan, sizes=replace(plan.sizes, draft_layers=drafts))
            backend = self.make(
                replace(
                    plan,
                    facts=replace(plan.facts, model=self.facts()),
                    device=self.device,
                    kv_dtype=self.cached_name,
                ),
                Worker(device=self.device, dtype=self.dtype),
            )
            assert backend.kv_layout().layers == self.facts().num_layers + drafts

    def test_layout_names_the_entries(self) -> None:
        layout = self.backend(self.page_size).kv_layout()
        assert {entry.name: entry.shape for entry in layout.entries} == self.entries
        assert layout.page_size == self.page_size and layout.layers == self.facts().num_layers
