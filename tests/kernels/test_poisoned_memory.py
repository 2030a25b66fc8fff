"""The fixture of this folder that poisons new memory, on which kernel tests rely."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_fresh_numbers_are_nan(dtype: torch.dtype, device: str) -> None:
    like = torch.ones(3, device=device).to(dtype)
    for fresh in (
        torch.empty(5, dtype=dtype, device=device),
        torch.empty_like(like),
        like.new_empty(2, 2),
    ):
        assert fresh.float().isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_fresh_integers_are_the_largest(device: str) -> None:
    assert (torch.empty(5, dtype=torch.int32, device=device) == 2**31 - 1).all()
