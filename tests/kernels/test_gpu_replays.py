"""Every Triton kernel of a step replayed from a graph with other inputs, into poisoned memory, at odd sizes, in bf16.

A kernel that keeps something from the capture, leaves out a row or reads what nobody wrote gives another result than
the reference of the new inputs. 16-bit results have to be within 1% of the float64 reference, FP8 products within 1.2
times the error that rounding to FP8 itself makes.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from glowplug.kernels import fp8, mla, rope as rope_reference
from glowplug.kernels.activation import silu_and_mul as silu_reference
from glowplug.kernels.norm import rms_norm_reference
from glowplug.kernels.triton import (
    activation,
    fp8_gemm,
    fp8_quant,
    merge,
    mla_absorbed_fp8,
    mla_expand,
    mla_prologue,
    moe_align,
    moe_experts,
    moe_gemm_fp8,
    moe_sort,
    moe_sum,
    norm,
    rope,
    route,
    sampling,
    skinny_gemm,
)
from glowplug.kernels.triton.mla_prefill import mla_prefill
from tests.kernels.test_triton_mla_absorbed_fp8 import product, stored

pytestmark = pytest.mark.gpu
BF16, ERROR, FP8_ERROR = torch.bfloat16, 1e-2, 1.2
CODES = 0.027  #: error of numbers from a bell curve in E4M3 without a scale
NAN = float("nan")
Results = Tensor | tuple[Tensor, ...]


@dataclass
class Case:
    """Inputs, which a replay overwrites; ``run`` makes results of them; ``want`` makes float64 references.

    ``within``: how far off a result may be, relative to the reference's norm; by default ``ERROR``. ``read``: what is
    compared of the results.
    """

    inputs: Sequence[Tensor]
    run: Callable[[], Results]
    want: Callable[[], Results]
    within: Callable[[], float | Sequence[float]] = lambda: ERROR
    read: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda results: results


def several(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def distance(got: Tensor, want: Tensor) -> float:
    """Of the norms; infinite where a result is not finite."""
    assert got.shape == want.shape
    off = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    return off if off == off else float("inf")


def check(made: Callable[[int], Case]) -> None:
    case = made(0)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = several(case.run())
    for seed in (0, 1, 2):
        for held, fresh in zip(case.inputs, made(seed).inputs, strict=True):
            held.copy_(fresh)
        for result in results:
            result.copy_(torch.full(result.shape, NAN if result.is_floating_point() else -7))
        graph.replay()
        wanted, within = several(case.want()), case.within()
        bounds = [within] * len(wanted) if isinstance(within, float) else within
        for number, (got, want, bound) in enumerate(zip(case.read(results), wanted, bounds, strict=True)):
            assert distance(got, want) <= bound, f"result {number} at replay {seed}"


def randn(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


# ---- norms, activation, rotation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens,size", [(1, 7168), (3, 1536), (17, 576), (130, 2048)])
def test_norms(tokens: int, size: int) -> None:
    def made(seed: int) -> Case:
        x, residual, weight = randn(seed, tokens, size), randn(seed + 10, tokens, size), randn(seed + 20, size)

        def want() -> Results:
            total = (x.double() + residual.double()).to(BF16)
            return (rms_norm_reference(x.double(), weight.double(), 1e-6), total,
                    rms_norm_reference(x.double() + residual.double(), weight.double(), 1e-6))

        def run() -> Results:
            normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
            return norm.rms_norm(x, weight, 1e-6), total, normed

        return Case((x, residual, weight), run, want)

    check(made)


def of_format(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double().repeat_interleave(fp8.BLOCK, 1)[:, : values.shape[1]]


def pairs_of_format(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Codes and scales in turn -> what they stand for."""
    return tuple(of_format(*results[at : at + 2]) for at in range(0, len(results), 2))


def format_error(exact: Tensor) -> float:
    """What rounding to E4M3 with a scale a token and 128 channels costs, times 1.2."""
    return FP8_ERROR * distance(of_format(*fp8.quantize_tokens(exact.float())), exact)


@pytest.mark.parametrize("tokens,size", [(1, 7168), (3, 1536), (17, 200), (130, 2048)])
def test_into_fp8(tokens: int, size: int) -> None:
    def made(seed: int) -> Case:
        x, residual, weight = randn(seed, tokens, 2 * size), randn(seed + 10, tokens, size), randn(seed + 20, size)
        half = x[:, :size]

        def run() -> Results:
            return (*fp8_quant.quantize(x), *fp8_quant.silu_and_mul(x), *norm.rms_norm_fp8(half, weight, 1e-6),
                    *norm.add_rms_norm_fp8(half, residual, weight, 1e-6)[0])

        def want() -> Results:
            normed = rms_norm_reference(half.double(), weight.double(), 1e-6)
            return (x.double(), silu_reference(x.double()), normed,
                    rms_norm_reference(half.double() + residual.double(), weight.double(), 1e-6))

        return Case((x, residual, weight), run, want, lambda: [format_error(one) for one in several(want())],
                    pairs_of_format)

    check(made)


@pytest.mark.parametrize("tokens,size", [(1, 1408), (5, 30), (66, 2048)])
def test_silu_and_mul(tokens: int, size: int) -> None:
    def made(seed: int) -> Case:
        x = randn(seed, tokens, 2 * size)
        return Case((x,), lambda: activation.silu_and_mul(x), lambda: silu_reference(x.double()))

    check(made)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens,heads", [(1, 16), (5, 3), (70, 128)])
def test_rope(tokens: int, heads: int, interleaved: bool) -> None:
    def made(seed: int) -> Case:
        q, k = randn(seed, tokens, heads, 64), randn(seed + 5, tokens, 1, 64)
        table = rope_reference.cos_sin_table(rope_reference.inverse_frequencies(64, 10000.0)[0], 1.0, 100)
        cos_sin = table[torch.randint(100, (tokens,), generator=torch.Generator().manual_seed(seed))].cuda()
        return Case((q, k, cos_sin), lambda: rope.rotate(q, k, cos_sin, interleaved),
                    lambda: tuple(rope_reference.rotate_reference(x.double(), cos_sin.double(), interleaved)
                                  for x in (q, k)))

    check(made)


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 17, 130])
@pytest.mark.parametrize("columns,depth", [(576, 7168), (200, 384)])
def test_fp8_products(tokens: int, columns: int, depth: int) -> None:
    """The error is that of the rounded operands of the float32 reference."""
    def made(seed: int) -> Case:
        x, weight = randn(seed, tokens, depth), randn(seed + 1, columns, depth, dtype=torch.float32)
        codes, scales = fp8.quantize_weight(weight)

        def within() -> float:
            rounded = fp8.block_scaled_mm(*fp8.quantize_tokens(x.float()), codes, scales)
            return FP8_ERROR * distance(rounded.to(BF16), x.double() @ weight.double().T)

        return Case((x, weight, codes, scales), lambda: fp8_gemm.gemm(*fp8_quant.quantize(x), codes, scales, BF16),
                    lambda: x.double() @ weight.double().T, within)

    check(made)


@pytest.mark.parametrize("tokens,size,depth,bias", [(1, 2112, 7168, False), (2, 576, 2048, True), (5, 102, 512, False)])
def test_few_tokens(tokens: int, size: int, depth: int, bias: bool) -> None:
    tile = skinny_gemm.rule(tokens, size, depth) or skinny_gemm.rule(1, 3072, 2048)
    assert tile is not None

    def made(seed: int) -> Case:
        x, weight, added = randn(seed, tokens, depth), randn(seed + 1, size, depth), randn(seed + 2, size)
        return Case((x, weight, added), lambda: skinny_gemm.multiply(x, weight, added if bias else None, tile),
                    lambda: x.double() @ weight.double().T + (added.double() if bias else 0))

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
            mla_prologue.by_heads(latent, dense, outs[2], 32, False)
            return tuple(outs)

        return Case((q, latent, dense, uk.values, uk.scales, uv.values, uv.scales), run,
                    lambda: (product(q, uk), product(latent, uv), torch.einsum("thk,hkn->thn", latent.double(),
                                                                               dense.double())))

    check(made)


# ---- experts --------------------------------------------------------------------------------------------------------


def chosen(seed: int, tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """ids int32 [T, K], some of them elsewhere, and weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]).int()
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return ids.cuda(), torch.rand(tokens, k, generator=generator).cuda()


def experts_reference(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor,
                      rounded: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """In float64, activations passed through ``rounded``."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(w13)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        inner = rounded(silu_reference(rounded(x[token].double()) @ w13[expert].double().T))
        out.index_add_(0, token, inner @ w2[expert].double().T * weights[token, slot, None].double())
    return out


@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
def test_experts(tokens: int) -> None:
    def made(seed: int) -> Case:
        x, (ids, weights) = randn(seed, tokens, 512), chosen(seed, tokens, 11, 4)
        w13, w2 = randn(seed + 1, 11, 2 * 192, 512) * 512**-0.5, randn(seed + 2, 11, 512, 192) * 192**-0.5
        return Case((x, ids, weights, w13, w2), lambda: moe_experts.experts(x, w13, w2, ids, weights),
                    lambda: experts_reference(x, w13, w2, ids, weights))

    check(made)


@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
def test_fp8_experts(tokens: int) -> None:
    rule = dict(moe_gemm_fp8.rule(tokens, 4, 11))

    def made(seed: int) -> Case:
        x, (ids, weights) = randn(seed, tokens, 512), chosen(seed, tokens, 11, 4)
        exact = (randn(seed + 1, 11, 512, 512, dtype=torch.float32) * 512**-0.5,
                 randn(seed + 2, 11, 512, 256, dtype=torch.float32) * 256**-0.5)
        (w13, scales13), (w2, scales2) = (tuple(torch.stack(part) for part in zip(*map(fp8.quantize_weight, weight)))
                                          for weight in exact)

        def want() -> Tensor:
            return experts_reference(x, *exact, ids, weights)

        def within() -> float:
            dense = [fp8.dequantize_weight(*weight, torch.float64) for weight in ((w13, scales13), (w2, scales2))]
            by_format = experts_reference(x, dense[0], dense[1], ids, weights,
                                          lambda y: fp8.fake_quantize_tokens(y.float()).double())
            return FP8_ERROR * distance(by_format, want())

        return Case((x, ids, weights, *exact, w13, scales13, w2, scales2),
                    lambda: moe_gemm_fp8.experts(*fp8_quant.quantize(x), w13, scales13, w2, scales2, ids, weights, BF16,
                                                 rule), want, within)

    check(made)


@pytest.mark.parametrize("tokens,experts,k", [(1, 9, 2), (40, 64, 6), (700, 256, 8)])
def test_alignment(tokens: int, experts: int, k: int) -> None:
    """Every pair of an expert that is here is placed once, in a block of its expert."""
    def made(seed: int) -> Case:
        ids, _ = chosen(seed, tokens, experts, k)

        def run() -> Results:
            found = moe_align.align(ids, experts, 16)
            return found.sorted_pairs, found.expert_of_block, found.num_padded

        def read(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            pairs, of_block, padded = results
            placed = pairs[: int(padded)].long()
            filled = (placed < ids.numel()).nonzero().flatten()
            order = placed[filled].argsort()
            return placed[filled][order], of_block[filled // 16][order]

        def want() -> Results:
            here = (ids.flatten() >= 0).nonzero().flatten()
            return here, ids.flatten()[here]

        return Case((ids,), run, want, lambda: 0.0, read)

    check(made)


@pytest.mark.parametrize("tokens,size", [(3, 200), (130, 2048)])
def test_rows_by_expert_and_back(tokens: int, size: int) -> None:
    def made(seed: int) -> Case:
        values, scales = fp8_quant.quantize(randn(seed, tokens, size))
        ids, weights = chosen(seed, tokens, 11, 3)

        def run() -> Results:
            rows, _, place = moe_sort.gather_rows(values, scales, moe_align.align(ids, 11, 16), ids)
            return moe_sort.sum_placed(rows.to(BF16), place, ids, weights)

        return Case((values, scales, ids, weights), run,
                    lambda: values.double() * (weights.double() * (ids >= 0)).sum(1, keepdim=True))

    check(made)


@pytest.mark.parametrize("tokens,k,size", [(1, 6, 2048), (13, 3, 130)])
def test_sums(tokens: int, k: int, size: int) -> None:
    def made(seed: int) -> Case:
        parts, (ids, _) = randn(seed, tokens * k, size), chosen(seed, tokens, 20, k)

        def want() -> Tensor:
            return (parts.view(tokens, k, size).double() * (ids >= 0)[..., None]).sum(1)

        return Case((parts, ids), lambda: moe_sum.moe_sum(parts, ids), want)

    check(made)


@pytest.mark.parametrize("tokens", [1, 9, 130])
@pytest.mark.parametrize("experts,hidden,k,groups,best,sigmoid",
                         [(64, 2048, 6, 1, 1, False), (256, 7168, 8, 8, 4, True)])
def test_route(tokens: int, experts: int, hidden: int, k: int, groups: int, best: int, sigmoid: bool) -> None:
    """The weights by expert, so that the order of ties is nobody's business."""
    from tests.kernels.test_triton_route import reference

    def spread(weights: Tensor, ids: Tensor) -> Tensor:
        empty = torch.zeros(tokens, experts, dtype=torch.float64, device="cuda")
        return empty.scatter_(1, ids.long(), weights.double())

    def made(seed: int) -> Case:
        x, weight = randn(seed, tokens, hidden), randn(seed + 1, experts, hidden) * (2 / hidden**0.5)
        bias = randn(seed + 2, experts, dtype=torch.float32) * 0.1
        given: tuple[Any, ...] = (x, weight, bias if sigmoid else None, k, groups, best, sigmoid, 2.5)
        return Case((x, weight, bias), lambda: spread(*route.route(*given, 0)), lambda: spread(*reference(*given)[:2]))

    check(made)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [3, 16])
def test_prefill(heads: int, causal: bool) -> None:
    """Lengths lie on the device and change, too."""
    lengths = [([5, 1, 130], [5, 70, 200]), ([64, 65, 7], [64, 65, 146]), ([2, 4, 130], [9, 66, 200])]

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

        return Case((q, both, k_rope, q_starts, k_starts),
                    lambda: mla_prefill(q, both[..., :128], k_rope, both[..., 128:], q_starts, k_starts, 136, 0.1,
                                        causal), want)

    check(made)


@pytest.mark.parametrize("tokens,heads,value", [(1, 16, 128), (130, 16, 128), (9, 128, 128), (70, 16, 64)])
def test_expanded_keys(tokens: int, heads: int, value: int) -> None:
    def made(seed: int) -> Case:
        entries, w_kv = randn(seed, tokens, 576), randn(seed + 1, heads, 128 + value, 512) * 512**-0.5
        return Case((entries, w_kv), lambda: mla_expand.expand(entries, w_kv, 128),
                    lambda: mla.expand(entries.double(), w_kv.double(), 128))

    check(made)


@pytest.mark.parametrize("kept", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens,decode,heads", [(1, 1, 16), (40, 7, 128), (9, 0, 3)])
def test_prologue(tokens: int, decode: int, heads: int, kept: torch.dtype) -> None:
    from tests.kernels.test_triton_mla_prologue import Case as Step

    def made(seed: int) -> Case:
        step = Step(tokens, decode, heads, 128, 512, 64, seed, BF16, kept)
        buffers = [torch.empty_like(x) for x in (step.query, step.absorbed, step.own)]
        cache = torch.zeros_like(step.cache.float()).to(kept)
        latent = step.compressed[:, :512].contiguous()

        def run() -> Results:
            query, absorbed, own = buffers
            query.copy_(step.query)
            mla_prologue.prologue(query, step.compressed, step.weight, 1e-6, step.cos_sin, True, cache, step.slots,
                                  absorbed, own, step.w_uk)
            there = mla_prologue.gather(cache, step.slots.int(), BF16)
            mla_prologue.store(latent, step.compressed[:, 512:], cache, step.slots)
            again = mla_prologue.gather(cache, step.slots.int(), BF16)
            return absorbed, own, there, again

        def want() -> Results:
            turned = [x.double() for x in (step.query, step.cache.float(), step.absorbed, step.own)]
            mla.prologue(turned[0], step.compressed.double(), step.weight.double(), 1e-6, step.cos_sin.double(), True,
                         turned[1], step.slots, turned[2], turned[3], step.w_uk.double())
            plain = torch.cat((latent, step.compressed[:, 512:]), -1).double()
            return turned[2], turned[3], turned[1][step.slots], plain

        inputs = (step.query, step.compressed, step.weight, step.cos_sin, step.slots, step.w_uk, latent)
        cached = ERROR if kept is BF16 else FP8_ERROR * CODES
        return Case(inputs, run, want, lambda: [ERROR, ERROR, cached, cached])

    check(made)


def test_merging() -> None:
    def made(seed: int) -> Case:
        out, part = randn(seed, 37, 5, 128, dtype=torch.float32), randn(seed + 1, 37, 5, 128)
        lse, part_lse = randn(seed + 2, 37, 5, dtype=torch.float32), randn(seed + 3, 37, 5, dtype=torch.float32)

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


@pytest.mark.parametrize("rows,vocab", [(1, 129280), (7, 1000), (130, 32001)])
def test_best_tokens(rows: int, vocab: int) -> None:
    arrived = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")

    def made(seed: int) -> Case:
        logits = randn(seed, rows, vocab, dtype=torch.float32)
        return Case((logits,), lambda: sampling.best(logits, arrived).tokens, lambda: logits.argmax(-1),
                    lambda: 0.0)

    check(made)
