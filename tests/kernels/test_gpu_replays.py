"""Norms, activation, rotation, linear GEMMs and the choice of tokens replayed from graphs, at odd
sizes, in bf16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from glowplug.kernels.elementwise import activation, norm, rope, rope_reference
from glowplug.kernels.elementwise.activation_reference import silu_and_mul as silu_reference
from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm import few_rows as skinny_gemm, fp8 as fp8_gemm
from glowplug.kernels.sampling.greedy import best
from tests.kernels.replays import BF16, FP8_ERROR, Case, Results, check, distance, randn, several

pytestmark = pytest.mark.gpu


# ---- norms, activation, rotation -----------------------------------------------------------------


@pytest.mark.parametrize("tokens,size", [(1, 7168), (3, 1536), (17, 576), (130, 2048)])
def test_norms(tokens: int, size: int) -> None:
    def made(seed: int) -> Case:
        x, residual, weight = (
            randn(seed, tokens, size),
            randn(seed + 10, tokens, size),
            randn(seed + 20, size),
        )

        def want() -> Results:
            total = (x.double() + residual.double()).to(BF16)
            return (
                rms_norm_reference(x.double(), weight.double(), 1e-6),
                total,
                rms_norm_reference(x.double() + residual.double(), weight.double(), 1e-6),
            )

        def run() -> Results:
            normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
            return norm.rms_norm(x, weight, 1e-6), total, normed

        return Case((x, residual, weight), run, want)

    check(made)


def of_format(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double().repeat_interleave(FP8_BLOCK, 1)[:, : values.shape[1]]


def pairs_of_format(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Dequantise alternating codes and scales."""
    return tuple(of_format(*results[at : at + 2]) for at in range(0, len(results), 2))


def format_error(exact: Tensor) -> float:
    """Return 1.2 times the error of rounding to E4M3 with a scale a token and 128 channels."""
    return FP8_ERROR * distance(of_format(*fp8.quantize_tokens(exact.float())), exact)


@pytest.mark.parametrize("tokens,size", [(1, 7168), (3, 1536), (17, 200), (130, 2048)])
def test_into_fp8(tokens: int, size: int) -> None:
    def made(seed: int) -> Case:
        x, residual, weight = (
            randn(seed, tokens, 2 * size),
            randn(seed + 10, tokens, size),
            randn(seed + 20, size),
        )
        half = x[:, :size]

        def run() -> Results:
            return (
                *fp8_quant.quantize(x),
                *fp8_quant.silu_and_mul(x),
                *norm.rms_norm_fp8(half, weight, 1e-6),
                *norm.add_rms_norm_fp8(half, residual, weight, 1e-6)[0],
            )

        def want() -> Results:
            normed = rms_norm_reference(half.double(), weight.double(), 1e-6)
            return (
                x.double(),
                silu_reference(x.double()),
                normed,
                rms_norm_reference(half.double() + residual.double(), weight.double(), 1e-6),
            )

        return Case(
            (x, residual, weight),
            run,
            want,
            lambda: [format_error(one) for one in several(want())],
            pairs_of_format,
        )

    check(made)


@pytest.mark.parametrize("rows,size", [(6, 192), (130, 2048)])
def test_activation_of_rows_with_a_pair(rows: int, size: int) -> None:
    def made(seed: int) -> Case:
        x, drawn = (
            randn(seed, rows, 2 * size),
            torch.rand(rows, generator=torch.Generator().manual_seed(seed)),
        )
        pairs = torch.where(drawn < 0.7, torch.arange(rows), rows).int().cuda()
        filled = torch.tensor([rows - 2 * seed], dtype=torch.int32, device="cuda")

        def of_pairs(whole: Tensor) -> Tensor:
            return torch.where(
                ((pairs < rows) & (torch.arange(rows, device="cuda") < filled))[:, None], whole, 0.0
            )

        def want() -> Tensor:
            return of_pairs(silu_reference(x.double()))

        return Case(
            (x, pairs, filled),
            lambda: fp8_quant.silu_and_mul_pairs(x, pairs, filled, rows),
            want,
            lambda: format_error(want()),
            lambda results: (of_pairs(of_format(*results)),),
        )

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
        table = rope_reference.cos_sin_table(
            rope_reference.inverse_frequencies(64, 10000.0)[0], 1.0, 100
        )
        cos_sin = table[
            torch.randint(100, (tokens,), generator=torch.Generator().manual_seed(seed))
        ].cuda()
        return Case(
            (q, k, cos_sin),
            lambda: rope.rotate(q, k, cos_sin, interleaved),
            lambda: tuple(
                rope_reference.rotate_reference(x.double(), cos_sin.double(), interleaved)
                for x in (q, k)
            ),
        )

    check(made)


# ---- GEMMs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 17, 130])
@pytest.mark.parametrize("columns,depth", [(576, 7168), (200, 384)])
def test_fp8_products(tokens: int, columns: int, depth: int) -> None:
    """The error is relative to the float32 reference of the rounded operands."""

    def made(seed: int) -> Case:
        x, weight = randn(seed, tokens, depth), randn(seed + 1, columns, depth, dtype=torch.float32)
        codes, scales = fp8.quantize_weight(weight)

        def within() -> float:
            rounded = fp8.block_scaled_mm(*fp8.quantize_tokens(x.float()), codes, scales)
            return FP8_ERROR * distance(rounded.to(BF16), x.double() @ weight.double().T)

        return Case(
            (x, weight, codes, scales),
            lambda: fp8_gemm.gemm(*fp8_quant.quantize(x), codes, scales, BF16),
            lambda: x.double() @ weight.double().T,
            within,
        )

    check(made)


@pytest.mark.parametrize("held,splits", [(8, 1), (16, 4)])
@pytest.mark.parametrize("columns,depth", [(576, 7168), (200, 640)])
def test_fp8_products_of_one_row(columns: int, depth: int, held: int, splits: int) -> None:
    def made(seed: int) -> Case:
        x, weight = randn(seed, 1, depth), randn(seed + 1, columns, depth, dtype=torch.float32)
        codes, scales = fp8.quantize_weight(weight)
        config = {"HELD": held, "SPLIT_K": splits, "num_warps": 4}

        def within() -> float:
            rounded = fp8.block_scaled_mm(*fp8.quantize_tokens(x.float()), codes, scales)
            return FP8_ERROR * distance(rounded.to(BF16), x.double() @ weight.double().T)

        return Case(
            (x, weight, codes, scales),
            lambda: fp8_gemm.gemm(*fp8_quant.quantize(x), codes, scales, BF16, config),
            lambda: x.double() @ weight.double().T,
            within,
        )

    check(made)


@pytest.mark.parametrize(
    "tokens,size,depth,bias", [(1, 2112, 7168, False), (2, 576, 2048, True), (5, 102, 512, False)]
)
def test_few_tokens(tokens: int, size: int, depth: int, bias: bool) -> None:
    tile = skinny_gemm.few_rows_tile(tokens, size, depth) or skinny_gemm.few_rows_tile(
        1, 3072, 2048
    )
    assert tile is not None

    def made(seed: int) -> Case:
        x, weight, added = (
            randn(seed, tokens, depth),
            randn(seed + 1, size, depth),
            randn(seed + 2, size),
        )
        return Case(
            (x, weight, added),
            lambda: skinny_gemm.multiply(x, weight, added if bias else None, tile),
            lambda: x.double() @ weight.double().T + (added.double() if bias else 0),
        )

    check(made)


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows,vocab", [(1, 129280), (7, 1000), (130, 32001)])
def test_best_tokens(rows: int, vocab: int) -> None:
    arrived = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")

    def made(seed: int) -> Case:
        logits = randn(seed, rows, vocab, dtype=torch.float32)
        return Case(
            (logits,),
            lambda: best(logits, arrived).tokens,
            lambda: logits.argmax(-1),
            lambda: 0.0,
        )

    check(made)
