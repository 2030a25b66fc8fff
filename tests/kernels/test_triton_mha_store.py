"""Keys and values are stored in a paged cache: their places, untouched slots, and values beyond
eight bits.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from glowplug.kernels.mha.store import mha_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_keys_and_values_are_stored() -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(5, 6, 12, generator=generator).to(DEVICE)
    caches = torch.full((2, 32, 2, 12), float("nan"), device=DEVICE)
    kv_slots = torch.tensor([3, 31, 8, 0, 16], device=DEVICE)
    mha_store(wide[:, 2:4], wide[:, 4:], *caches, kv_slots, follows=True)
    assert torch.equal(caches[0][kv_slots], wide[:, 2:4]) and torch.equal(
        caches[1][kv_slots], wide[:, 4:]
    )
    assert int(torch.isfinite(caches).sum()) == 2 * 5 * 24


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 1030])
def test_at_published_sizes(tokens: int) -> None:
    """Eight heads of 128 come after 32 of queries; the last slot of the cache is among those
    written.
    """
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, 48, 128, generator=generator).to(DEVICE, torch.bfloat16)
    caches = torch.zeros(2, 2048, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    kv_slots = torch.randperm(2047, generator=generator)[:tokens]
    kv_slots[0] = 2047
    kv_slots = kv_slots.to(DEVICE)
    mha_store(wide[:, 32:40], wide[:, 40:], *caches, kv_slots, follows=False)
    expected = torch.zeros_like(caches)
    expected[0, kv_slots], expected[1, kv_slots] = wide[:, 32:40], wide[:, 40:]
    assert torch.equal(caches, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_eight_bits_cannot_hold_saturates(dtype: torch.dtype) -> None:
    k = torch.tensor([1e6, -1e6, 0.5, 3.0], device=DEVICE, dtype=torch.bfloat16).view(1, 1, 4)
    caches = torch.zeros(2, 4, 1, 4, device=DEVICE).to(dtype)
    mha_store(k, -k, *caches, torch.tensor([2], device=DEVICE), follows=False)
    most = torch.finfo(dtype).max
    assert caches[0][2].float().tolist() == [[most, -most, 0.5, 3.0]]
    assert caches[1][2].float().tolist() == [[-most, most, -0.5, -3.0]]
