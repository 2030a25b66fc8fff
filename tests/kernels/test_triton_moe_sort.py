"""Rows sorted by their experts and sorted back, against indexing."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.formats import fp8_triton as fp8_quant  # noqa: E402
from glowplug.kernels.moe.align import align  # noqa: E402
from glowplug.kernels.moe.sort import gather_rows, sum_placed  # noqa: E402


@pytest.mark.parametrize("tokens, size", [(1, 128), (7, 320), (40, 256)])
def test_rows_are_sorted_and_sorted_back(tokens: int, size: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(tokens)]).to(
        torch.int32
    )
    ids[0, 1] = -1
    ids = ids.to(DEVICE)
    x, scales = fp8_quant.quantize(torch.randn(tokens, size, generator=generator).to(DEVICE))
    order = align(ids, 5, 16)
    values, sorted_scales, place = gather_rows(x, scales, order, ids)
    assert values.shape[0] == order.sorted_pairs.shape[0] and sorted_scales.stride(0) == 1
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            continue
        row = int(place[pair])
        assert (
            int(order.expert_of_block[row // 16]) == expert and int(order.sorted_pairs[row]) == pair
        )
        assert torch.equal(values[row].float(), x[pair // 3].float())
        assert torch.equal(sorted_scales[row], scales[pair // 3])

    y = torch.full((values.shape[0], 72), torch.nan, device=DEVICE)
    here = ids.flatten() >= 0
    y[place[here].long()] = torch.randn(int(here.sum()), 72, generator=generator).to(DEVICE)
    weights = torch.rand(tokens, 3, generator=generator).to(DEVICE)
    parts = torch.where(here[:, None], y[torch.where(here, place, 0).long()], 0.0).view(
        tokens, 3, 72
    )
    torch.testing.assert_close(
        sum_placed(y, place, ids, weights), (parts * weights[..., None]).sum(1)
    )
