"""Normalisation and activation against float64 formulas, odd shapes, replayed on changed inputs."""

from __future__ import annotations

import pytest
import torch

from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.elementwise.norm_reference import add_rms_norm, rms_norm, rms_norm_reference

SHAPES = [(1, 1), (1, 256), (3, 7), (17, 576), (0, 64)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm(shape: tuple[int, int], scale: float) -> None:
    for seed in (0, 1):
        x = torch.randn(shape, generator=generator(seed)) * scale
        weight = torch.randn(shape[1], generator=generator(seed + 10))
        wide = x.double()
        wanted = (
            wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        ).float()
        for function in (rms_norm, rms_norm_reference):
            torch.testing.assert_close(function(x, weight, 1e-6), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int]) -> None:
    x, residual = (torch.randn(shape, generator=generator(seed)) for seed in (2, 3))
    before = residual.clone()
    weight = torch.rand(shape[1], generator=generator(4))
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, before), "the given residual is not overwritten"
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, rms_norm_reference(x + residual, weight, 1e-5))


def test_rms_norm_of_half_precision_accumulates_in_float32() -> None:
    x = torch.full((2, 4096), 300.0, dtype=torch.float16)  # squares overflow float16
    assert torch.isfinite(rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6)).all()


def test_rms_norm_reads_strided_rows() -> None:
    wide = torch.randn(5, 96, generator=generator(5))
    weight = torch.rand(32, generator=generator(6))
    torch.testing.assert_close(
        rms_norm(wide[:, 48:80], weight, 1e-6),
        rms_norm_reference(wide[:, 48:80].contiguous(), weight, 1e-6),
    )


@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (64, 512), (0, 8)])
def test_silu_and_mul(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=generator(7)) * 5
    before = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(
        silu_and_mul(x), (gate / (1 + (-gate).exp()) * up).float(), atol=1e-6, rtol=1e-5
    )
    assert torch.equal(x, before)
