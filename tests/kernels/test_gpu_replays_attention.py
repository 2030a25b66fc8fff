"""Latent attention's own kernels replayed from graphs, at odd sizes, in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from glowplug.kernels.mla import (
    absorbed_fp8 as mla_absorbed_fp8,
    decode as mla_decode,
    decode_tiling,
    expand as mla_expand,
    head_gemms,
    prologue as mla_prologue,
    reference as mla,
    value_projection as mla_values,
)
from glowplug.kernels.mla.prefill import mla_prefill
from glowplug.kernels.paged import merge_states as merge
from tests.kernels.replays import BF16, ERROR, FP8_ERROR, Case, Results, check, randn
from tests.kernels.test_triton_mla_absorbed_fp8 import product, stored
from tests.kernels.test_triton_mla_decode import Case as Paged
from tests.kernels.test_triton_mla_prologue import Case as Step

pytestmark = pytest.mark.gpu
CODES = 0.027  #: error of normally distributed numbers in E4M3 without a scale


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [3, 16])
def test_prefill(heads: int, causal: bool) -> None:
    """Lengths are on the device and change, too."""
    lengths = [
        ([5, 1, 130], [5, 70, 200]),
        ([64, 65, 7], [64, 65, 146]),
        ([2, 4, 130], [9, 66, 200]),
    ]

    def starts(counts: list[int]) -> Tensor:
        return torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")

    def made(seed: int) -> Case:
        q, both = randn(seed, 136, heads, 192), randn(seed + 1, 275, heads, 256)
        k_rope, (queries, keys) = randn(seed + 2, 275, 64), lengths[seed]
        q_starts, k_starts = starts(queries), starts(keys)

        def want() -> Results:
            key = torch.cat((both[..., :128], k_rope[:, None].expand(-1, heads, -1)), -1)
            counts = q_starts.diff().tolist(), k_starts.diff().tolist()
            return mla.ragged_reference(q, key, both[..., 128:], *counts, 0.1, causal)

        return Case(
            (q, both, k_rope, q_starts, k_starts),
            lambda: mla_prefill(
                q, both[..., :128], k_rope, both[..., 128:], q_starts, k_starts, 136, 0.1, causal
            ),
            want,
        )

    check(made)


@pytest.mark.parametrize(
    "tokens,heads,value", [(1, 16, 128), (130, 16, 128), (9, 128, 128), (70, 16, 64)]
)
def test_expanded_keys(tokens: int, heads: int, value: int) -> None:
    def made(seed: int) -> Case:
        entries, w_kv = (
            randn(seed, tokens, 576),
            randn(seed + 1, heads, 128 + value, 512) * 512**-0.5,
        )
        return Case(
            (entries, w_kv),
            lambda: mla_expand.expand(entries, w_kv, 128),
            lambda: mla.expand(entries.double(), w_kv.double(), 128),
        )

    check(made)


@pytest.mark.parametrize("kept", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "rows,heads", [(8, 16), (9, 8), (16, 16), (32, 16), (1, 128), (3, 128), (8, 128)]
)
def test_parts_joined_by_the_values_product(rows: int, heads: int, kept: torch.dtype) -> None:
    """Some rows have fewer splits than others, and the replay changes which; memory of splits that
    are not written holds NaN.
    """
    cut = decode_tiling.mla_tiling(
        rows, 1, heads, 2048, BF16, kept, torch.cuda.get_device_capability() == (9, 0), True
    )
    cut = cut if cut.merge_in_values else replace(cut, splits=4)

    def made(seed: int) -> Case:
        lengths = [(1, 65, 1025, 64, 130, 700, 577, 63)[row % 8] for row in range(rows)]
        given = Paged(
            lengths, heads=heads, lora=512, rope=64, page=64, dtype=BF16, seed=seed, spare=1
        )
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).cuda()
        table, lens, kv = given.table[order], given.lengths[order], given.kv.to(kept)
        w_uv = (randn(seed + 1, heads, 256, 512) * 512**-0.5)[:, 128:].transpose(1, 2)
        out = torch.empty(rows, heads, 128, dtype=BF16, device="cuda")

        def run() -> Results:
            parts = mla_decode.decode_splits(
                given.query, kv, table, lens, given.scale, 64, 512, cut
            )
            mla_values.merge_and_project(*parts, lens, w_uv, out, cut.block_n)
            return out, *parts

        def want() -> Results:
            latent = mla.paged_latent_reference(
                given.query, kv.float(), table, lens, given.scale, 64, 512
            )
            return (
                mla.project_output(latent, w_uv.double().to(latent.device))
                .view(rows, heads, 128)
                .to(out.device)
            )

        return Case(
            (given.query, kv, table, lens, w_uv), run, want, read=lambda results: results[:1]
        )

    check(made)


@pytest.mark.parametrize("kept", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens,decode,heads", [(1, 1, 16), (40, 7, 128), (9, 0, 3)])
def test_prologue(tokens: int, decode: int, heads: int, kept: torch.dtype) -> None:
    def made(seed: int) -> Case:
        step = Step(tokens, decode, heads, 128, 512, 64, seed, BF16, kept)
        buffers = [torch.empty_like(x) for x in (step.query, step.absorbed, step.own)]
        cache = torch.zeros_like(step.cache.float()).to(kept)
        latent = step.compressed[:, :512].contiguous()

        def run() -> Results:
            query, absorbed, own = buffers
            query.copy_(step.query)
            mla_prologue.prologue(
                query,
                step.compressed,
                step.weight,
                1e-6,
                step.cos_sin,
                True,
                cache,
                step.kv_slots,
                absorbed,
                own,
                step.w_uk,
            )
            there = mla_prologue.gather(cache, step.kv_slots.int(), BF16)
            mla_prologue.store(latent, step.compressed[:, 512:], cache, step.kv_slots)
            again = mla_prologue.gather(cache, step.kv_slots.int(), BF16)
            return absorbed, own, there, again

        def want() -> Results:
            turned = [x.double() for x in (step.query, step.cache.float(), step.absorbed, step.own)]
            mla.prologue(
                turned[0],
                step.compressed.double(),
                step.weight.double(),
                1e-6,
                step.cos_sin.double(),
                True,
                turned[1],
                step.kv_slots,
                turned[2],
                turned[3],
                step.w_uk.double(),
            )
            plain = torch.cat((latent, step.compressed[:, 512:]), -1).double()
            return turned[2], turned[3], turned[1][step.kv_slots], plain

        inputs = (
            step.query,
            step.compressed,
            step.weight,
            step.cos_sin,
            step.kv_slots,
            step.w_uk,
            latent,
        )
        cached = ERROR if kept is BF16 else FP8_ERROR * CODES
        return Case(inputs, run, want, lambda: [ERROR, ERROR, cached, cached])

    check(made)


def test_merging() -> None:
    def made(seed: int) -> Case:
        out, part = randn(seed, 37, 5, 128, dtype=torch.float32), randn(seed + 1, 37, 5, 128)
        lse, part_lse = (
            randn(seed + 2, 37, 5, dtype=torch.float32),
            randn(seed + 3, 37, 5, dtype=torch.float32),
        )

        def run() -> Results:
            total, base = out.clone(), lse.clone()
            merge.merge_into(total, base, part, part_lse)
            return total, base

        def want() -> Results:
            both = torch.stack((lse, part_lse)).double()
            weights = both.softmax(0)[..., None]
            return weights[0] * out.double() + weights[1] * part.double(), both.logsumexp(0)

        return Case((out, part, lse, part_lse), run, want)

    check(made)


@pytest.mark.parametrize("tokens,heads", [(1, 128), (7, 16), (33, 5)])
def test_products_by_heads(tokens: int, heads: int) -> None:
    def made(seed: int) -> Case:
        (uk, uv), q = stored(heads, 128, 128, 512, seed), randn(seed, tokens, heads, 128)
        latent, dense = randn(seed + 1, tokens, heads, 512), randn(seed + 2, heads, 512, 128)
        outs = [x.new_empty(tokens, heads, n) for x, n in ((q, 512), (latent, 128), (latent, 128))]

        def run() -> Results:
            mla_absorbed_fp8.multiply(q, uk, outs[0], 128)
            mla_absorbed_fp8.multiply(latent, uv, outs[1], 64)
            head_gemms.by_heads(latent, dense, outs[2], 32, False)
            return tuple(outs)

        return Case(
            (q, latent, dense, uk.values, uk.scales, uv.values, uv.scales),
            run,
            lambda: (
                product(q, uk),
                product(latent, uv),
                torch.einsum("thk,hkn->thn", latent.double(), dense.double()),
            ),
        )

    check(made)
