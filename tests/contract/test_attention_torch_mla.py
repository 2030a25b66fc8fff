"""``torch_mla`` over random paged layouts against the float64 definition."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.protocols import Worker
from glowplug.kernels.mla import mla_reference
from glowplug.plugins.attention.torch_mla import TorchMlaOptions, register_attention_backends
from glowplug.plugins.attention.torch_mla_runtime import TorchMla
from tests.contract.attention_world import PLACES, Row, World, fake_plan, make_world, random_rows

HEADS, NOPE, ROPE, VALUE, LATENT = 3, 8, 4, 6, 16


@dataclass
class Layer:
    w_uk: Tensor
    w_uv: Tensor
    index: int = 0
    heads: int = HEADS
    nope_dim: int = NOPE
    rope_dim: int = ROPE
    v_dim: int = VALUE
    lora_rank: int = LATENT
    scale: float = 0.37

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("mc,hnc->mhn", latent, self.w_uk), torch.einsum("mc,hcv->mhv", latent, self.w_uv)


def make_layer(generator: torch.Generator) -> Layer:
    return Layer(torch.randn(HEADS, NOPE, LATENT, generator=generator) / 4,
                 torch.randn(HEADS, LATENT, VALUE, generator=generator) / 4)


def backend(page_size: int, absorb: bool = True, small: bool = False, dtype: torch.dtype = torch.float32) -> TorchMla:
    plan = fake_plan(page_size, num_heads=HEADS, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    made = TorchMla(TorchMlaOptions(absorb=absorb), cast(Any, plan), Worker(dtype=dtype))
    if small:  # groups split and prefixes go in pieces already at these lengths
        made._limits = replace(made._limits, decode_keys=97, keys=23, queries=60)
    return made


def run(made: TorchMla, world: World, layer: Layer, generator: torch.Generator, device: str = "cpu",
        dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(backend's output, float64 reference), both [T, H * V]."""
    latent, rope = world.fill("latent", (LATENT,), generator), world.fill("rope", (ROPE,), generator)
    tokens = latent.shape[0]
    q_nope = torch.randn(tokens, HEADS, NOPE, generator=generator)
    q_rope = torch.randn(tokens, HEADS, ROPE, generator=generator)
    world.move(device, dtype)
    made.reserve(world.limits())
    made.plan_step(world.batch, None)
    there = Layer(layer.w_uk.to(device, dtype), layer.w_uv.to(device, dtype))
    out = made.mla(*(x.to(device, dtype) for x in (q_nope, q_rope, latent, rope)), there).cpu()
    expected, at = [], 0
    for index, row in enumerate(world.rows):
        part = slice(at, at + row.queries)
        expected.append(mla_reference(q_nope[part], q_rope[part], world.cached["latent"][index],
                                      world.cached["rope"][index], layer.w_uk, layer.w_uv, layer.scale))
        at += row.queries
    return out, torch.cat(expected).flatten(1)


@pytest.mark.parametrize(("device", "dtype", "error"), PLACES)
@pytest.mark.parametrize("absorb", [True, False])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_layouts(seed: int, page_size: int, small: bool, absorb: bool, device: str, dtype: torch.dtype,
                        error: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed * 31 + page_size)
    world = make_world(random_rows(rng, page_size, width=1 + seed % 4), page_size, seed, spare_columns=seed % 3)
    made = backend(page_size, absorb, small, dtype)
    out, expected = run(made, world, make_layer(generator), generator, device, dtype)
    torch.testing.assert_close(out.double(), expected, rtol=5 * error, atol=error)


@pytest.mark.parametrize("absorb", [True, False])
def test_the_step_is_stored(absorb: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    world = make_world([Row(17, 1), Row(16, 1), Row(33, 20, prefill=True)], 16, 5)
    run(backend(16, absorb), world, make_layer(generator), generator)
    for index in range(3):
        for name in ("latent", "rope"):
            assert torch.equal(world.pools[name][world.slots_of(index)], world.cached[name][index])


@pytest.mark.parametrize("small", [True, False])
def test_chunked_equals_whole(small: bool) -> None:
    """A prompt in chunks that end on both sides of a page boundary gives what it gives at once."""
    length, generator = 61, torch.Generator().manual_seed(3)
    layer = make_layer(generator)
    latent, rope = torch.randn(length, LATENT, generator=generator), torch.randn(length, ROPE, generator=generator)
    q_nope = torch.randn(length, HEADS, NOPE, generator=generator)
    q_rope = torch.randn(length, HEADS, ROPE, generator=generator)
    for chunks in ([61], [15, 16, 17, 13], [1, 31, 29], [33, 28]):
        made, pools, outs, end = backend(16, small=small), None, [], 0
        for chunk in chunks:
            start, end = end, end + chunk
            world = make_world([Row(end, chunk, prefill=True)], 16, 11)
            world.batch.pages[0] = world.batch.page_table[0] = torch.arange(3, 3 + world.batch.pages.shape[1])
            world.batch.slots = world.slots_of(0)[start:]
            pools = pools or {"latent": torch.zeros(512, LATENT), "rope": torch.zeros(512, ROPE)}
            world.pools = pools
            made.reserve(world.limits())
            made.plan_step(world.batch, None)
            outs.append(made.mla(q_nope[start:end], q_rope[start:end], latent[start:end], rope[start:end], layer))
        expected = mla_reference(q_nope, q_rope, latent, rope, layer.w_uk, layer.w_uv, layer.scale).flatten(1)
        torch.testing.assert_close(torch.cat(outs).double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("absorb", [True, False])
def test_alone_equals_in_a_batch(absorb: bool) -> None:
    generator, layer_seed = torch.Generator().manual_seed(9), torch.Generator().manual_seed(10)
    layer, rows = make_layer(layer_seed), [Row(n, 1) for n in (1, 5, 16, 17, 31, 32, 33, 64)]
    world = make_world(rows, 16, 9)
    latent, rope = world.fill("latent", (LATENT,), generator), world.fill("rope", (ROPE,), generator)
    q_nope = torch.randn(8, HEADS, NOPE, generator=generator)
    q_rope = torch.randn(8, HEADS, ROPE, generator=generator)
    made = backend(16, absorb)
    made.reserve(world.limits())
    made.plan_step(world.batch, None)
    together = made.mla(q_nope, q_rope, latent, rope, layer)
    for index, row in enumerate(rows):
        alone = make_world([row], 16, 1)
        alone.pools = world.pools
        alone.batch.page_table = world.batch.page_table[index : index + 1]
        alone.batch.slots = world.batch.slots[index : index + 1]
        made.plan_step(alone.batch, None)
        one = slice(index, index + 1)
        torch.testing.assert_close(made.mla(q_nope[one], q_rope[one], latent[one], rope[one], layer), together[one],
                                   rtol=0, atol=1e-6)


def test_padded_and_idle_rows_are_harmless() -> None:
    """A padded row (length 0, scratch pages) must not turn into NaN; an idle step has no tokens at all."""
    generator = torch.Generator().manual_seed(2)
    layer, made = make_layer(generator), backend(16)
    world = make_world([Row(20, 1), Row(1, 1)], 16, 2)
    world.fill("latent", (LATENT,), generator), world.fill("rope", (ROPE,), generator)
    world.batch.page_table[1] = 0
    world.batch.kv_lens_device[1] = 0
    world.batch.slots[1] = 0
    made.reserve(world.limits())
    made.plan_step(world.batch, None)
    args = [torch.randn(2, *shape, generator=generator) for shape in ((HEADS, NOPE), (HEADS, ROPE), (LATENT,), (ROPE,))]
    assert torch.isfinite(made.mla(*args, layer)).all()
    idle = make_world([], 16, 2)
    made.plan_step(idle.batch, None)
    assert made.mla(*(arg[:0] for arg in args), layer).shape == (0, HEADS * VALUE)


def test_lengths_known_on_the_device_only() -> None:
    """``kv_lens`` on the host may be an upper bound: what counts is ``kv_lens_device``."""
    generator = torch.Generator().manual_seed(4)
    layer, made = make_layer(generator), backend(16)
    world = make_world([Row(30, 2), Row(12, 2)], 16, 4)
    out, expected = run(made, world, layer, generator)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    world.batch.kv_lens = world.batch.kv_lens + np.int32(2)
    again, expected = run(made, world, layer, torch.Generator().manual_seed(6))
    torch.testing.assert_close(again.double(), expected, rtol=1e-5, atol=2e-6)


def test_layout_and_offers() -> None:
    layout = backend(16).kv_layout()
    assert layout.token_bytes == 4 * (LATENT + ROPE)
    (component,) = register_attention_backends()
    assert component.offers.kinds == {"mla"}  # type: ignore[attr-defined]
