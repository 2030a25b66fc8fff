"""Gates and experts replayed from graphs, at odd sizes, in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from glowplug.kernels.elementwise.activation_reference import silu_and_mul as silu_reference
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant
from glowplug.kernels.moe import (
    align as moe_align,
    experts as moe_experts,
    route,
    sort as moe_sort,
    sum as moe_sum,
)
from glowplug.kernels.moe.fp8 import experts as fp8_experts, tiles as moe_fp8_tiles
from glowplug.plugins.quantization.block_fp8.cuda import grouped
from tests.kernels.replays import BF16, FP8_ERROR, Case, Results, check, distance, randn
from tests.kernels.test_triton_route import reference

pytestmark = pytest.mark.gpu


def chosen(seed: int, tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Return ids int32 [T, K], some of them of experts elsewhere, and weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    ).int()
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return ids.cuda(), torch.rand(tokens, k, generator=generator).cuda()


def experts_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    rounded: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Compute the experts in float64, with activations passed through ``rounded``."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(w13)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        inner = rounded(silu_reference(rounded(x[token].double()) @ w13[expert].double().T))
        out.index_add_(
            0, token, inner @ w2[expert].double().T * weights[token, slot, None].double()
        )
    return out


@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
def test_experts(tokens: int) -> None:
    def made(seed: int) -> Case:
        x, (ids, weights) = randn(seed, tokens, 512), chosen(seed, tokens, 11, 4)
        w13, w2 = (
            randn(seed + 1, 11, 2 * 192, 512) * 512**-0.5,
            randn(seed + 2, 11, 512, 192) * 192**-0.5,
        )
        return Case(
            (x, ids, weights, w13, w2),
            lambda: moe_experts.experts(x, w13, w2, ids, weights),
            lambda: experts_reference(x, w13, w2, ids, weights),
        )

    check(made)


def fp8_case(
    tokens: int, hidden: int, inter: int, run: Callable[..., Tensor]
) -> Callable[[int], Case]:
    """Return a case of ``run``: (x quantised, its scales, w13, scales13, w2, scales2, ids, weights)
    -> [T, H].
    """

    def made(seed: int) -> Case:
        x, (ids, weights) = randn(seed, tokens, hidden), chosen(seed, tokens, 11, 4)
        exact = (
            randn(seed + 1, 11, 2 * inter, hidden, dtype=torch.float32) * hidden**-0.5,
            randn(seed + 2, 11, hidden, inter, dtype=torch.float32) * inter**-0.5,
        )
        (w13, scales13), (w2, scales2) = (
            tuple(torch.stack(part) for part in zip(*map(fp8.quantize_weight, weight)))
            for weight in exact
        )

        def want() -> Tensor:
            return experts_reference(x, *exact, ids, weights)

        def within() -> float:
            dense = [
                fp8.dequantize_weight(*weight, torch.float64)
                for weight in ((w13, scales13), (w2, scales2))
            ]
            by_format = experts_reference(
                x,
                dense[0],
                dense[1],
                ids,
                weights,
                lambda y: fp8.fake_quantize_tokens(y.float()).double(),
            )
            return FP8_ERROR * distance(by_format, want())

        return Case(
            (x, ids, weights, *exact, w13, scales13, w2, scales2),
            lambda: run(*fp8_quant.quantize(x), w13, scales13, w2, scales2, ids, weights),
            want,
            within,
        )

    return made


@pytest.mark.parametrize("order", ["tiles", "columns"])
@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
def test_fp8_experts(tokens: int, order: str) -> None:
    rule = dict(moe_fp8_tiles.fp8_experts_rule(tokens, 4, 11, False))
    rule |= {part: {**rule[part], "ORDER": order} for part in ("first", "second")}
    check(fp8_case(tokens, 512, 256, lambda *given: fp8_experts.experts(*given, BF16, rule)))


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("tokens", [1, 33, 130, 700])
def test_fp8_experts_on_hopper(tokens: int, group: int) -> None:
    check(
        fp8_case(
            tokens,
            512,
            256,
            lambda *given: fp8_experts.experts(*given, BF16, moe_fp8_tiles.hopper(group)),
        )
    )


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_fp8_experts_of_paired_tiles_in_parts(tokens: int, splits: int) -> None:
    rule = dict(moe_fp8_tiles.fp8_experts_rule(tokens, 4, 11, False)) | {"PAIRED": True}
    rule |= {"first": {**rule["first"], "SPLITS": splits}}
    check(fp8_case(tokens, 512, 256, lambda *given: fp8_experts.experts(*given, BF16, rule)))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory allocated in the block with NaN, or the largest integer; in a graph at every
    replay.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # the condition under which torch fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("hidden,inter", [(512, 256), (640, 384)])
@pytest.mark.parametrize("tokens", [1, 5, 33, 130, 300, 520])
@pytest.mark.parametrize("wanted", ["deep_gemm_masked", "cutlass"])
def test_fp8_experts_of_libraries(wanted: str, tokens: int, hidden: int, inter: int) -> None:
    """Some of 11 experts get no row of one token, others more than a tile of 520 tokens; for
    CUTLASS these are more pairs than the limit for swapped operands, and more tokens than the
    masked layout is used for.
    """
    pytest.importorskip("sgl_kernel" if wanted == "cutlass" else "deep_gemm")
    provider = grouped(wanted)

    def run(*given: Tensor) -> Tensor:
        with poisoned():
            return provider.experts(*given, BF16)

    check(fp8_case(tokens, hidden, inter, run))


@pytest.mark.parametrize("tokens,experts,k", [(1, 9, 2), (40, 64, 6), (700, 256, 8)])
def test_alignment(tokens: int, experts: int, k: int) -> None:
    """Every pair of a local expert is placed once, in a block of its expert."""

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

        return Case(
            (values, scales, ids, weights),
            run,
            lambda: values.double() * (weights.double() * (ids >= 0)).sum(1, keepdim=True),
        )

    check(made)


@pytest.mark.parametrize("tokens,k,size", [(1, 6, 2048), (13, 3, 130)])
def test_sums(tokens: int, k: int, size: int) -> None:
    def made(seed: int) -> Case:
        parts, (ids, _) = randn(seed, tokens * k, size), chosen(seed, tokens, 20, k)

        def want() -> Tensor:
            return (parts.view(tokens, k, size).double() * (ids >= 0)[..., None]).sum(1)

        return Case((parts, ids), lambda: moe_sum.moe_sum(parts, ids), want)

    check(made)


@pytest.mark.parametrize("tokens", [1, 9, 130, 300])
@pytest.mark.parametrize(
    "experts,hidden,k,groups,best,sigmoid", [(64, 2048, 6, 1, 1, False), (256, 7168, 8, 8, 4, True)]
)
def test_route(
    tokens: int, experts: int, hidden: int, k: int, groups: int, best: int, sigmoid: bool
) -> None:
    """Weights are compared by expert, so the order of ties does not matter."""

    def spread(weights: Tensor, ids: Tensor) -> Tensor:
        empty = torch.zeros(tokens, experts, dtype=torch.float64, device="cuda")
        return empty.scatter_(1, ids.long(), weights.double())

    def made(seed: int) -> Case:
        x, weight = (
            randn(seed, tokens, hidden),
            randn(seed + 1, experts, hidden) * (2 / hidden**0.5),
        )
        bias = randn(seed + 2, experts, dtype=torch.float32) * 0.1
        given: tuple[Any, ...] = (
            x,
            weight,
            bias if sigmoid else None,
            k,
            groups,
            best,
            sigmoid,
            2.5,
        )
        return Case(
            (x, weight, bias),
            lambda: spread(*route.route(*given, 0)),
            lambda: spread(*reference(*given)[:2]),
        )

    check(made)
