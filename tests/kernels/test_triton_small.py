"""Normalisation, activation and rotation in Triton against the references: in the interpreter, or
on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.elementwise import activation, norm, rope
from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.kernels.elementwise.rope_reference import rotate_reference
from glowplug.kernels.launch.sums import add_pairs
from glowplug.kernels.moe.sum import moe_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (1, 256), (3, 7), (17, 576), (2, 1025), (0, 64)]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_norms(shape: tuple[int, int], scale: float) -> None:
    for seed in (0, 1):
        x, residual = randn(*shape, seed=seed) * scale, randn(*shape, seed=seed + 10) * scale
        before, weight = residual.clone(), randn(shape[1], seed=seed + 20)
        torch.testing.assert_close(
            norm.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)
        )
        normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(normed, rms_norm_reference(x + residual, weight, 1e-6))
        assert torch.equal(residual, before), "the given residual is not overwritten"


def test_norms_read_strided_rows_and_more_dimensions() -> None:
    wide, weight = randn(5, 96, seed=2), randn(32, seed=3)
    part, other = wide[:, 48:80], wide[:, 3:35]
    torch.testing.assert_close(
        norm.rms_norm(part, weight, 1e-6), rms_norm_reference(part, weight, 1e-6)
    )
    torch.testing.assert_close(
        norm.add_rms_norm(part, other, weight, 1e-6)[0],
        rms_norm_reference(part + other, weight, 1e-6),
    )
    deep = randn(2, 3, 32, seed=4)
    torch.testing.assert_close(
        norm.rms_norm(deep, weight, 1e-6), rms_norm_reference(deep, weight, 1e-6)
    )


@pytest.mark.parametrize(
    ("tokens", "width", "size"), [(1, 8, 256), (3, 1, 7), (5, 9, 576), (2, 6, 1025), (0, 8, 64)]
)
def test_norm_of_the_rows_of_experts(tokens: int, width: int, size: int) -> None:
    """The norm covers the sum of a token's rows, whatever the rows of absent experts hold; then it
    works as for any other row.
    """
    for seed in (0, 1):
        rows, residual = randn(tokens * width, size, seed=seed), randn(tokens, size, seed=seed + 10)
        ids = (
            torch.randint(-1, 4, (tokens, width), generator=torch.Generator().manual_seed(seed))
            .int()
            .to(DEVICE)
        )
        rows[ids.flatten() < 0] = torch.nan
        weight, summed = randn(size, seed=seed + 20), add_pairs(rows, ids) + residual
        normed, total = norm.add_rms_norm(rows, residual, weight, 1e-6, ids)
        torch.testing.assert_close(total, summed)
        torch.testing.assert_close(normed, rms_norm_reference(summed, weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "size"), [(8, 2048), (9, 7168)])
def test_the_rows_of_experts_are_summed_as_apart_within_rounding(width: int, size: int) -> None:
    for tokens in (1, 33, 128):
        rows, residual, weight = (
            randn(*shape, seed=tokens, dtype=torch.bfloat16)
            for shape in ((tokens * width, size), (tokens, size), (size,))
        )
        ids = torch.arange(width, dtype=torch.int32, device=DEVICE).repeat(tokens, 1)
        exact = add_pairs(rows.double(), ids).double() + residual.double()
        normed, total = norm.add_rms_norm(
            rows, residual, weight, 1e-6, torch.cat([ids, ids - 99], 1)[:, :width]
        )
        apart, apart_total = norm.add_rms_norm(moe_sum(rows, ids), residual, weight, 1e-6)
        assert (total - exact).abs().max() <= 1.01 * (apart_total - exact).abs().max()
        wanted = rms_norm_reference(exact, weight.double(), 1e-6)
        assert (normed - wanted).norm() <= 1.05 * (apart - wanted).norm() + 1e-6
        plain = torch.full_like(residual, torch.nan)
        (values, scales), again = norm.add_rms_norm_fp8(rows, residual, weight, 1e-6, plain, ids)
        assert torch.equal(again, total) and torch.equal(plain, normed)
        wide = values.float() * scales.repeat_interleave(128, 1)
        assert (wide - wanted).norm() <= 0.04 * wanted.norm()


def test_norm_of_half_precision_accumulates_in_float32() -> None:
    x = torch.full((2, 4096), 300.0, dtype=torch.float16, device=DEVICE)  # squares overflow float16
    torch.testing.assert_close(
        norm.rms_norm(x, torch.ones(4096, dtype=torch.float16, device=DEVICE), 1e-6),
        torch.ones_like(x),
    )


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (17, 576), (2, 2050), (0, 64)])
def test_silu_and_mul(shape: tuple[int, int]) -> None:
    for seed in (5, 6):
        x = randn(*shape, seed=seed) * 20
        gate, up = x.double().chunk(2, dim=-1)
        torch.testing.assert_close(activation.silu_and_mul(x), (gate * gate.sigmoid() * up).float())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [(1, 1), (16, 1), (5, 2), (0, 1), (33, 33)])
@pytest.mark.parametrize("size", [64, 24])
def test_rope(interleaved: bool, heads: tuple[int, int], size: int) -> None:
    tokens = 3
    for seed in (7, 8):
        query = randn(tokens, heads[0], size + 8, seed=seed)[
            ..., 8:
        ]  # strided, as attention layers pass it
        key = randn(tokens, heads[1] * size + 4, seed=seed + 5)[:, 4:].view(tokens, heads[1], size)
        cos_sin = randn(tokens, size, seed=seed + 9)
        kept = query.clone(), key.clone()
        q, k = rope.rotate(query, key, cos_sin, interleaved)
        torch.testing.assert_close(q, rotate_reference(query, cos_sin, interleaved))
        torch.testing.assert_close(k, rotate_reference(key, cos_sin, interleaved))
        assert torch.equal(query, kept[0]) and torch.equal(key, kept[1])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 4097])
@pytest.mark.parametrize("size", [2048, 7168])
def test_bfloat16(tokens: int, size: int) -> None:
    kind = torch.bfloat16
    x, residual, weight = (randn(tokens, size, seed=s, dtype=kind) for s in (1, 2, 3))
    total = x + residual
    normed, summed = norm.add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(summed, total)
    wide = rms_norm_reference(total.float(), weight[0].float(), 1e-6)
    torch.testing.assert_close(normed.float(), wide, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(norm.rms_norm(total, weight[0], 1e-6), normed, atol=0, rtol=0)
    gate, up = total.float().chunk(2, dim=-1)
    torch.testing.assert_close(
        activation.silu_and_mul(total).float(), gate * gate.sigmoid() * up, atol=1e-3, rtol=1e-2
    )
    query, at = residual.view(tokens, -1, 64), randn(tokens, 64, seed=4)
    for interleaved in (True, False):
        q, k = rope.rotate(query, query[:, :1], at, interleaved)
        torch.testing.assert_close(
            q.float(), rotate_reference(query.float(), at, interleaved), atol=1e-3, rtol=1e-2
        )
        assert torch.equal(k, q[:, :1])
