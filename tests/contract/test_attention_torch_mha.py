"""``torch_mha`` over random paged layouts against the float64 definition: MHA, GQA and MQA."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.protocols import Worker
from glowplug.kernels.mha import mha_reference
from glowplug.plugins.attention.torch_mha import TorchMhaOptions
from glowplug.plugins.attention.torch_mha_runtime import TorchMha
from tests.contract.attention_world import PLACES, Row, World, fake_plan, make_world, random_rows

DIM = 8


@dataclass
class Layer:
    heads: int
    kv_heads: int
    index: int = 0
    head_dim: int = DIM
    scale: float = 0.41


def backend(page_size: int, layer: Layer, small: bool = False, dtype: torch.dtype = torch.float32) -> TorchMha:
    plan = fake_plan(page_size, num_kv_heads=layer.kv_heads, head_dim=DIM)
    made = TorchMha(TorchMhaOptions(), cast(Any, plan), Worker(dtype=dtype))
    if small:  # groups split and prefixes go in pieces already at these lengths
        made._limits = replace(made._limits, decode_keys=97, keys=23, queries=60)
    return made


def run(made: TorchMha, world: World, layer: Layer, generator: torch.Generator, device: str,
        dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(backend's output, float64 reference), both [T, H * D]."""
    k = world.fill("k", (layer.kv_heads, DIM), generator)
    v = world.fill("v", (layer.kv_heads, DIM), generator)
    q = torch.randn(k.shape[0], layer.heads, DIM, generator=generator)
    world.move(device, dtype)
    made.reserve(world.limits())
    made.plan_step(world.batch, None)
    out = made.mha(q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), layer).cpu()
    expected, at = [], 0
    for index, row in enumerate(world.rows):
        expected.append(mha_reference(q[at : at + row.queries], world.cached["k"][index], world.cached["v"][index],
                                      layer.scale))
        at += row.queries
    return out, torch.cat(expected).flatten(1)


@pytest.mark.parametrize(("device", "dtype", "error"), PLACES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_layouts(seed: int, page_size: int, small: bool, heads: tuple[int, int], device: str,
                        dtype: torch.dtype, error: float) -> None:
    generator, layer = torch.Generator().manual_seed(seed), Layer(*heads)
    rng = np.random.default_rng(seed * 37 + page_size)
    world = make_world(random_rows(rng, page_size, width=1 + seed % 4), page_size, seed, spare_columns=seed % 3)
    made = backend(page_size, layer, small, dtype)
    out, expected = run(made, world, layer, generator, device, dtype)
    torch.testing.assert_close(out.double(), expected, rtol=5 * error, atol=error)


def test_the_step_is_stored_and_alone_equals_in_a_batch() -> None:
    generator, layer = torch.Generator().manual_seed(1), Layer(6, 2)
    rows = [Row(n, 1) for n in (1, 15, 16, 17, 33)] + [Row(40, 9, prefill=True), Row(21, 21, prefill=True)]
    world = make_world(rows, 16, 1)
    k, v = world.fill("k", (2, DIM), generator), world.fill("v", (2, DIM), generator)
    q = torch.randn(k.shape[0], 6, DIM, generator=generator)
    made = backend(16, layer)
    made.reserve(world.limits())
    made.plan_step(world.batch, None)
    together, at = made.mha(q, k, v, layer), 0
    for index, row in enumerate(rows):
        assert torch.equal(world.pools["k"][world.slots_of(index)], world.cached["k"][index])
        alone, part = make_world([row], 16, 2), slice(at, at + row.queries)
        alone.pools = world.pools
        alone.batch.page_table = world.batch.page_table[index : index + 1]
        alone.batch.slots = world.batch.slots[part]
        made.plan_step(alone.batch, None)
        torch.testing.assert_close(made.mha(q[part], k[part], v[part], layer), together[part], rtol=0, atol=1e-6)
        at += row.queries


def test_cache_of_a_narrower_dtype_is_read_as_stored() -> None:
    """With a bfloat16 cache a chunk sees rounded keys, whether it reads them from the cache or has just made them."""
    generator, layer = torch.Generator().manual_seed(3), Layer(4, 2)
    outs = []
    k, v = torch.randn(24, 2, DIM, generator=generator), torch.randn(24, 2, DIM, generator=generator)
    q = torch.randn(24, 4, DIM, generator=generator)
    for chunks in ((24,), (11, 13)):
        made, end, parts = backend(16, layer), 0, []
        pools = {name: torch.zeros(256, 2, DIM, dtype=torch.bfloat16) for name in ("k", "v")}
        for chunk in chunks:
            start, end = end, end + chunk
            world = make_world([Row(end, chunk, prefill=True)], 16, 0)
            world.batch.pages[0] = world.batch.page_table[0] = torch.arange(1, 1 + world.batch.pages.shape[1])
            world.batch.slots = world.slots_of(0)[start:]
            world.pools = pools
            made.reserve(world.limits())
            made.plan_step(world.batch, None)
            parts.append(made.mha(q[start:end], k[start:end], v[start:end], layer))
        outs.append(torch.cat(parts))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
