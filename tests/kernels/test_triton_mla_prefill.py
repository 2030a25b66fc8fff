"""Ragged attention over expanded keys against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.kernels.mla import reference as mla

pytest.importorskip("triton")
from glowplug.kernels.mla.prefill import mla_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)


def check(
    queries: list[int],
    keys: list[int],
    causal: bool,
    heads: int = 2,
    nope: int = 16,
    rope: int = 16,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    error: float = 1e-5,
    shared: bool = True,
) -> None:
    """Compare with the definition; with ``shared`` all heads have one rotary part, else all three
    tensors are views of wider ones.
    """
    generator = torch.Generator().manual_seed(len(queries) + sum(keys))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    q = random(sum(queries), heads, nope + rope)
    both = random(sum(keys), heads, nope + size)
    k_nope, v = both[..., :nope], both[..., nope:]
    k_rope = random(sum(keys), rope)
    if not shared:
        k_nope, k_rope = random(sum(keys), heads, nope + rope).split([nope, rope], dim=-1)
    out, lse = mla_prefill(
        q, k_nope, k_rope, v, starts(queries), starts(keys), max(queries), 0.2, causal
    )
    wide = k_rope if k_rope.dim() == 3 else k_rope.unsqueeze(1).expand(-1, heads, -1)
    expected, expected_lse = mla.ragged_reference(
        q, torch.cat((k_nope, wide), -1), v, queries, keys, 0.2, causal
    )
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=max(error, 1e-4) / 10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_many_lengths(causal: bool, shared: bool) -> None:
    check([1, 33, 16, 40], [1, 33, 50, 41], causal, shared=shared)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_without_keys(causal: bool) -> None:
    """A row without keys, and one whose first queries come before all of its keys, give zeros and
    -inf.
    """
    check([5, 20, 3], [0, 4, 7], causal)


def test_a_row_without_queries() -> None:
    check([4, 0, 2], [4, 9, 2], True)


def test_odd_sizes() -> None:
    check([17, 3], [36, 3], True, heads=3, nope=8, rope=4, size=6)
    check([17], [36], False, heads=3, nope=24, rope=6, size=40)


def test_half_precision() -> None:
    check([70, 9], [70, 80], True, dtype=torch.float16, error=3e-3)


def test_no_tokens() -> None:
    empty = torch.zeros(0, 2, 32, device=DEVICE)
    k_rope, none = empty[:, 0, :16], starts([0])
    out, lse = mla_prefill(
        empty, empty[..., :16], k_rope, empty[..., :16], none, none, 0, 1.0, True
    )
    assert out.shape == (0, 2, 16) and lse.shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [3, 16])
def test_published_sizes(causal: bool, heads: int) -> None:
    check(
        [1, 64, 65, 300, 129],
        [1, 64, 200, 300, 1000],
        causal,
        heads,
        128,
        64,
        128,
        torch.bfloat16,
        1e-2,
    )
    check([1, 2, 60], [1, 700, 64], causal, heads, 128, 64, 128, torch.bfloat16, 1e-2)


@pytest.mark.gpu
def test_published_sizes_in_float32() -> None:
    check([65, 130], [65, 200], True, 4, 128, 64, 128, torch.float32, 2e-5)
