"""Alignment and the final sum of routed experts, against a loop over experts. Interpreted without a
GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.moe import align as moe_align
from glowplug.kernels.moe.sum import moe_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw_ids(tokens: int, k: int, experts: int, absent: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, 1).indices.int()
    ids[torch.rand(tokens, k, generator=generator) < absent] = -1
    return ids


def check(ids: Tensor, experts: int, block_m: int) -> None:
    found = moe_align.align(ids.to(DEVICE), experts, block_m)
    pairs, places = ids.numel(), []
    blocks: list[int] = []
    for expert in range(experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        size = -(-len(mine) // block_m)
        places += mine + [pairs] * (size * block_m - len(mine))
        blocks += [expert] * size
    assert found.num_padded.tolist() == [len(places)]
    assert found.sorted_pairs[: len(places)].tolist() == places
    limit = moe_align.max_blocks(pairs, experts, block_m)
    assert found.expert_of_block.tolist() == blocks + [-1] * (limit - len(blocks))
    ends = np.cumsum(
        [0] + [-(-int((ids == expert).sum()) // block_m) * block_m for expert in range(experts)]
    )
    assert found.ends.tolist() == [int(ends[e]) + int((ids == e).sum()) for e in range(experts)]


@pytest.mark.parametrize("launches", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block_m"),
    [(1, 1, 1, 16), (1, 6, 8, 16), (3, 2, 5, 1), (33, 4, 7, 16), (150, 2, 5, 64), (5, 8, 10, 128)],
)
@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
def test_align(
    tokens: int,
    k: int,
    experts: int,
    block_m: int,
    absent: float,
    launches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_align, "ONE_LAUNCH_PAIRS_MAX", 4096 if launches == 1 else 0)
    check(draw_ids(tokens, k, experts, absent, 0), experts, block_m)
    check(draw_ids(tokens, k, experts, absent, 1).long(), experts, block_m)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block_m"),
    [(128, 8, 66, 16), (512, 9, 257, 32), (513, 8, 66, 16), (8192, 8, 66, 128), (3000, 9, 257, 64)],
)
def test_align_of_many(tokens: int, k: int, experts: int, block_m: int) -> None:
    for absent in (0.0, 0.5):
        check(draw_ids(tokens, k, experts, absent, tokens), experts, block_m)


@pytest.mark.parametrize(("tokens", "k", "size"), [(0, 2, 16), (1, 8, 40), (3, 1, 1030), (5, 3, 7)])
def test_sum(tokens: int, k: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = torch.randn(tokens * k, size, generator=generator)
    ids = torch.randint(-1, 4, (tokens, k), generator=generator).int()
    wanted = (parts.view(tokens, k, size) * (ids >= 0).unsqueeze(2)).sum(1)
    parts[ids.flatten() < 0] = float("nan")
    torch.testing.assert_close(moe_sum(parts.to(DEVICE), ids.to(DEVICE)).cpu(), wanted)
    wider = torch.cat([ids, ids - 7], 1).to(DEVICE)
    torch.testing.assert_close(moe_sum(parts.to(DEVICE), wider[:, :k]).cpu(), wanted)
