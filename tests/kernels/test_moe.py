"""Routed experts: every method against the reference, for loads from empty to uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.moe import reference as moe


def problem(
    tokens: int,
    experts: int,
    k: int,
    seed: int,
    skew: float = 0.0,
    hidden: int = 24,
    inter: int = 12,
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, hidden, 2 * inter, generator=generator) / 5
    w2 = torch.randn(experts, inter, hidden, generator=generator) / 3
    liking = torch.randn(tokens, experts, generator=generator) + skew * torch.arange(experts)
    ids = liking.topk(k, dim=-1).indices
    return (
        torch.randn(tokens, hidden, generator=generator),
        w13,
        w2,
        ids,
        torch.rand(tokens, k, generator=generator),
    )


def naive(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a token and an expert at a time, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert >= 0:
                gate, up = (x[token].double() @ w13[expert].double()).chunk(2)
                out[token] += weight * (gate * gate.sigmoid() * up) @ w2[expert].double()
    return out.float()


LOADS = [
    (0, 4, 2, 0.0),
    (1, 4, 2, 0.0),
    (1, 64, 8, 0.0),
    (2, 64, 4, 0.0),
    (3, 4, 2, 0.0),
    (16, 16, 4, 0.0),
    (16, 64, 4, 0.0),
    (40, 8, 1, 3.0),
    (40, 8, 3, 3.0),
    (5, 4, 4, 0.0),
    (200, 16, 4, 0.0),
]


@pytest.mark.parametrize(("tokens", "experts", "k", "skew"), LOADS)
def test_host_experts(tokens: int, experts: int, k: int, skew: float) -> None:
    for seed in (0, 1):
        given = problem(tokens, experts, k, seed, skew)
        wanted = naive(*given)
        for function in (moe.experts_host, moe.experts_reference):
            torch.testing.assert_close(function(*given, silu_and_mul), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("absent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("tokens", "experts", "k", "skew"), LOADS)
def test_host_experts_some_elsewhere(
    tokens: int, experts: int, k: int, skew: float, absent: float
) -> None:
    x, w13, w2, ids, weights = problem(tokens, experts, k, 7, skew)
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(tokens)) < absent] = -1
    weights[ids < 0] = float("nan")
    found = moe.experts_some_host(x, w13, w2, ids, weights, silu_and_mul)
    torch.testing.assert_close(found, naive(x, w13, w2, ids, weights), atol=1e-5, rtol=1e-4)


def recorded(function: Callable[..., Tensor], name: str, taken: list[str]) -> Callable[..., Tensor]:
    def spy(*args: Any) -> Tensor:
        taken.append(name)
        return function(*args)

    return spy


def test_each_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not a multiple of 16 bytes are computed by a loop over the experts."""
    taken: list[str] = []
    for name in ("_pairwise", "_grouped", "_looped"):
        monkeypatch.setattr(moe, name, recorded(getattr(moe, name), name, taken))
    for tokens, experts, k, skew, hidden in [
        (1, 16, 4, 0.0, 24),
        (2, 64, 4, 0.0, 24),
        (64, 16, 4, 0.0, 24),
        (40, 64, 1, 3.0, 22),
    ]:
        given = problem(tokens, experts, k, 5, skew, hidden)
        torch.testing.assert_close(
            moe.experts_host(*given, silu_and_mul), naive(*given), atol=1e-5, rtol=1e-4
        )
    assert taken == ["_pairwise", "_pairwise", "_grouped", "_grouped", "_looped"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemms_equal_a_loop_over_experts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w13, w2, _, _ = (part.to(dtype) for part in problem(40, 8, 1, 11, inter=16))
    counts = np.array([0, 7, 0, 1, 0, 30, 2, 0])
    tokens = np.random.default_rng(0).permutation(40)
    wanted = moe._looped(x[torch.from_numpy(tokens)], w13, w2, counts, silu_and_mul)
    monkeypatch.delattr(moe, "_looped")  # it is not what is compared with itself
    found = moe._grouped(x, w13, w2, tokens, counts, silu_and_mul)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("tokens", "experts", "k", "skew"), LOADS)
@pytest.mark.parametrize("absent", [False, True])
def test_device_experts(tokens: int, experts: int, k: int, skew: float, absent: bool) -> None:
    x, w13, w2, ids, weights = problem(tokens, experts, k, 3, skew)
    if absent:  # experts of another rank
        ids = torch.where(ids % 3 == 0, -1, ids)
    wanted = naive(x, w13, w2, ids, weights)
    torch.testing.assert_close(
        moe.experts_device(x, w13, w2, ids, weights, silu_and_mul), wanted, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        moe.experts_reference(x, w13, w2, ids, weights, silu_and_mul), wanted, atol=1e-5, rtol=1e-4
    )
