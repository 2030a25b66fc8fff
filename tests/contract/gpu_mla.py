"""The attention suite at DeepSeek's sizes on a GPU, with two further requirements: projections in
place of normed inputs, and decoding steps replayed from a graph.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, RopeRows
from glowplug.core.testing.harness.paged_world import Row, World, make_world, random_rows
from glowplug.core.testing.suites.attention import MhaCase, MlaCase, MlaSuite
from glowplug.kernels.elementwise import rope_reference as rope
from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.kernels.formats import fp8
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from tests.contract.gpu_graphs import padded, plant, refill

EPS = 1e-6


class ProjectedSuite(MlaSuite):
    """The suite with further tests: ``mla_projected`` of the raw projections equals ``mla`` of the
    normed and rotated ones, and ``prepare_mla`` with ``attend_prepared`` equals ``mla_projected``.
    """

    merged = True

    def test_projections_are_taken_as_they_come(self) -> None:
        for seed, interleaved in enumerate((True, False, True)):
            rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
            rows = random_rows(rng, self.page_size, width=min(1 + seed, self.max_width))
            world = make_world(rows, self.page_size, seed)
            self.arguments(world, generator)
            there, projected = (
                self.there(self.layer(generator)),
                Projections(self, world.batch.num_tokens, seed),
            )
            world.move(self.device, self.cached)
            latent, k_rope, q_nope, q_rope = projected.done(interleaved)
            outs, pools = [], []
            for taken in (False, True):
                backend = self.backend(self.page_size)
                world.pools = {"kv": world.pools["kv"].clone()}
                backend.reserve(world.limits())
                backend.plan_step(world.batch, None)
                outs.append(
                    projected.give(backend, interleaved, there)
                    if taken
                    else backend.mla(q_nope, q_rope, latent, k_rope, there)
                )
                pools.append(world.pools["kv"].float().cpu())
            torch.testing.assert_close(outs[1], outs[0], rtol=10 * self.error, atol=10 * self.error)
            near = (
                2 * self.error if self.cached.itemsize > 1 else 0.13
            )  # FP8: one of the two ways rounds to bf16 before
            torch.testing.assert_close(
                pools[1], pools[0], rtol=near, atol=2 * self.error, equal_nan=True
            )

    def test_a_step_is_prepared_with_padding(self) -> None:
        """Padding is stored in KV slot 0, and the results are those without it."""
        for seed, (interleaved, padding) in enumerate(((True, 0), (False, 1), (True, 9))):
            rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
            rows = random_rows(rng, self.page_size, width=min(1 + seed, self.max_width))
            world = make_world(rows, self.page_size, seed)
            self.arguments(world, generator)
            there = self.there(self.layer(generator))
            tokens = world.batch.num_tokens
            projected = Projections(self, tokens + padding, seed)
            world.move(self.device, self.cached)
            outs, pools = [], []
            for prepared in (False, True):
                backend = self.backend(self.page_size)
                world.pools = {"kv": world.pools["kv"].clone()}
                backend.reserve(world.limits())
                backend.plan_step(world.batch, None)
                if prepared:
                    outs.append(projected.prepare(backend, world, interleaved, there))
                else:
                    outs.append(projected.give(backend, interleaved, there, tokens))
                pools.append(world.pools["kv"].float().cpu()[1:])
            torch.testing.assert_close(outs[1], outs[0], rtol=10 * self.error, atol=10 * self.error)
            torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=0, equal_nan=True)

    def test_stored_blocks_are_read(self) -> None:
        """In a layer whose weights are block FP8, the blocks give the results of the dequantised
        weights.
        """
        if self.nope % FP8_BLOCK or self.value % FP8_BLOCK or self.lora % FP8_BLOCK:
            pytest.skip("heads are not whole blocks")
        for seed, width in enumerate((1, min(3, self.max_width))):
            generator = torch.Generator().manual_seed(seed)
            world = make_world([Row(n + width, width) for n in (1, 70, 200)], self.page_size, seed)
            self.arguments(world, generator)
            layer, projected = (
                self.stored(generator),
                Projections(self, world.batch.num_tokens, seed),
            )
            world.move(self.device, self.cached)
            outs = []
            for option in ("bf16", "fp8"):
                backend = self.backend(self.page_size)
                backend._absorbed = option  # type: ignore[attr-defined]
                world.pools = {"kv": world.pools["kv"].clone()}
                backend.reserve(world.limits())
                backend.plan_step(world.batch, None)
                outs.append(projected.give(backend, True, layer))
            torch.testing.assert_close(outs[1], outs[0], rtol=10 * self.error, atol=10 * self.error)
            assert not torch.equal(*outs), (
                "they are read: exact codes and rounded weights differ a little"
            )

    def stored(self, generator: torch.Generator) -> MlaCase:
        rows = self.nope + self.value
        weight = (
            torch.randn(self.heads * rows, self.lora, generator=generator)
            .mul_(self.lora**-0.5)
            .to(self.device)
        )
        values, scales = fp8.quantize_weight(weight)
        dense = fp8.dequantize_weight(values, scales, self.dtype).view(self.heads, rows, self.lora)
        layer = self._case(dense[:, : self.nope], dense[:, self.nope :].transpose(1, 2))
        layer.kv_stored = (
            values.view(self.heads, rows, self.lora),
            scales.view(self.heads, rows // FP8_BLOCK, self.lora // FP8_BLOCK),
        )
        return layer

    def there(self, layer: MlaCase) -> MlaCase:
        return self._case(
            layer.w_uk.to(self.device, self.dtype), layer.w_uv.to(self.device, self.dtype)
        )


class Projections:
    """Random projections of a step as views of one tensor, and the references' results for them."""

    def __init__(self, suite: MlaSuite, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(100 + seed)
        self.shape = tokens, suite.heads, suite.nope + suite.rope
        size, self.lora, self.nope = suite.heads * (suite.nope + suite.rope), suite.lora, suite.nope
        wide = torch.randn(tokens, size + suite.lora + suite.rope, generator=generator)
        self.wide = wide.to(suite.device, suite.dtype)
        self.weight = torch.randn(suite.lora, generator=generator).to(suite.device, suite.dtype)
        table = rope.cos_sin_table(rope.inverse_frequencies(suite.rope, 10000.0)[0], 1.0, 500)
        self.cos_sin = table[torch.randint(500, (tokens,), generator=generator)].to(suite.device)

    def views(self, wide: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the queries and the compressed part of ``wide``; None: of the projections."""
        wide = self.wide if wide is None else wide
        size = self.shape[1] * self.shape[2]
        return wide[:, :size].view(self.shape), wide[:, size:]

    def done(self, interleaved: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, compressed = self.views()
        k_rope = rope.rotate_reference(compressed[:, None, self.lora :], self.cos_sin, interleaved)[
            :, 0
        ]
        q_rope = rope.rotate_reference(query[..., self.nope :], self.cos_sin, interleaved)
        latent = rms_norm_reference(compressed[:, : self.lora], self.weight, EPS)
        return latent, k_rope, query[..., : self.nope].clone(), q_rope

    def give(
        self,
        backend: AttentionBackend,
        interleaved: bool,
        layer: MlaCase,
        tokens: int | None = None,
    ) -> Tensor:
        """Run ``mla_projected`` of the first ``tokens`` tokens; None: all.

        The backend may overwrite the query, so it gets a copy.
        """
        query, compressed = (part[:tokens] for part in self.copies())
        at = RopeRows(self.cos_sin[:tokens], interleaved)
        assert backend.mla_projected is not None
        return backend.mla_projected(query, compressed, self.weight, EPS, at, layer)

    def prepare(
        self, backend: AttentionBackend, world: World, interleaved: bool, layer: MlaCase
    ) -> Tensor:
        """Run ``prepare_mla`` of all tokens, and ``attend_prepared`` of those of the step."""
        kv_slots = world.batch.kv_slots.new_zeros(self.shape[0])
        kv_slots[: world.batch.num_tokens] = world.batch.kv_slots
        rows = backend.prepare_mla(  # type: ignore[attr-defined]
            *self.copies(), self.weight, EPS, RopeRows(self.cos_sin, interleaved), kv_slots, layer
        )
        found: Tensor = backend.attend_prepared(  # type: ignore[attr-defined]
            layer, *(part[: world.batch.num_tokens] for part in rows)
        )
        return found

    def copies(self) -> tuple[Tensor, Tensor]:
        """Return ``views`` of a copy."""
        return self.views(self.wide.clone())


def drafting(plan: EnginePlan) -> EnginePlan:
    """Return the plan with layers of a draft, so that backends reserve memory for draft passes: its
    own ones, or else its last layer.
    """
    if plan.sizes.draft_layers:
        return replace(plan, sizes=replace(plan.sizes, draft_extends=True))
    model = replace(plan.facts.model, num_layers=plan.facts.model.num_layers - 1)
    sizes = replace(plan.sizes, draft_layers=1, draft_extends=True)
    return replace(plan, facts=replace(plan.facts, model=model), sizes=sizes)


class GpuMlaSuite(ProjectedSuite):
    """bf16 at DeepSeek-V2-Lite's sizes."""

    device, dtype, error = "cuda", torch.bfloat16, 1e-2
    heads, nope, rope, value, lora = 16, 128, 64, 128, 512
    page_sizes = (1, 16, 64)
    page_size = 64
    capture_widths: tuple[int, ...] = (1, 3)
    most_keys = 64  #: small enough for prefixes to be attended in pieces, too

    def definition(
        self, queries: list[Tensor], history: list[Tensor], layer: MlaCase | MhaCase
    ) -> Tensor:
        """Compute the definition on the device, which is faster in float64."""
        assert isinstance(layer, MlaCase)
        there = self._case(layer.w_uk.to(self.device), layer.w_uv.to(self.device))
        moved = [[x.to(self.device) for x in given] for given in (queries, history)]
        return super().definition(*moved, there).cpu()

    @pytest.mark.parametrize("first_key", [0, 1])
    @pytest.mark.parametrize("trees", [False, True])
    def test_a_graph_replays_decoding_steps(self, first_key: int, trees: bool) -> None:
        """The graph is captured over padding rows only, and replayed with other lengths, pages,
        tokens and trees each time.
        """
        if trees:
            self.needs_trees()
        if first_key and not self.first_key:
            pytest.skip("this backend reads every position")
        for width in self.capture_widths:
            generator = torch.Generator().manual_seed(width)
            layer, backend, key = (
                self.there(self.layer(generator)),
                self.backend(self.page_size),
                object(),
            )
            worlds = [self.decoding(number, width, first_key) for number in range(3)]
            pool = torch.cat([world.pools["kv"] for world in worlds])
            pool[: self.page_size] = 0.0
            # number of tokens; those after them are padding, which all write to one place
            real = 4 * width
            backend.reserve(worlds[0].limits(({"kv": pool},)))
            static = padded(width, first_key, self.page_size, self.device, self.cached)
            if trees:
                plant(static, 0)
            given = Projections(self, static.num_tokens, 0)
            backend.plan_step(static, key)
            given.give(backend, True, layer)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = given.give(backend, True, layer)
            offset = 0
            for number, world in enumerate(worlds):
                fresh = Projections(self, static.num_tokens, number)
                given.wide.copy_(fresh.wide)
                given.cos_sin.copy_(fresh.cos_sin)
                refill(static, world.batch, offset, self.page_size)
                if trees:
                    plant(static, offset)
                backend.plan_step(static, key)
                graph.replay()
                replayed = out.clone()
                assert torch.isfinite(replayed).all()
                backend.plan_step(static, None)
                eager = given.give(backend, True, layer)
                torch.testing.assert_close(
                    replayed[:real], eager[:real], rtol=self.error, atol=self.error
                )
                offset += world.num_pages

    def decoding(self, seed: int, width: int, first_key: int) -> World:
        lengths = np.random.default_rng(seed).integers(1, 700, 4)
        world = make_world(
            [Row(int(n) + width + first_key, width) for n in lengths], self.page_size, seed, 12
        )
        world.batch.first_key = first_key
        world.fill("kv", (self.lora + self.rope,), torch.Generator().manual_seed(seed), self.cached)
        world.move(self.device, self.cached)
        return world
