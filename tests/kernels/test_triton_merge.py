"""States merged in place by Triton against the reference: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from glowplug.kernels.paged import merge_states as triton_merge, merge_states_reference as merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(3, 5, 16), (1, 1, 24), (9, 2, 128), (0, 4, 8)]
)
def test_merged_states_equal_the_reference(tokens: int, heads: int, size: int) -> None:
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        outs = torch.randn(2, tokens, heads, size, generator=generator).to(DEVICE)
        lses = (torch.randn(2, heads, tokens, generator=generator) * 20).to(DEVICE)
        empty = (
            torch.rand(2, heads, tokens, generator=generator).to(DEVICE) < 0.3
        )  # states over no keys
        lses[empty] = float("-inf")
        outs[empty.transpose(1, 2)] = float("nan")
        got, lse = outs[0].clone(), lses[0].clone().t()
        triton_merge.merge_into(got, lse, outs[1].half(), lses[1].t())
        expected, expected_lse = outs[0].clone(), lses[0].clone().t()
        merge.merge_into(expected, expected_lse, outs[1].half(), lses[1].t())
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
