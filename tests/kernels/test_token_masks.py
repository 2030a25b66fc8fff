"""Masks of allowed tokens: torch against plain Python, Triton against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.kernels.sampling import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(rows: list[int], total: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, rows, masks, and the logits as they have to become."""
    dice = torch.Generator().manual_seed(vocab)
    logits = torch.randn(total, vocab, generator=dice)
    bits = torch.rand(len(rows), -(-vocab // 32) * 32, generator=dice) < 0.5
    weights = torch.tensor([1 << bit for bit in range(32)])
    words = (bits.view(len(rows), -1, 32).long() * weights).sum(-1)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    wanted = logits.clone()
    for i, row in enumerate(rows):
        wanted[row][~bits[i, :vocab]] = float("-inf")
    return logits, torch.tensor(rows), masks, wanted


@pytest.mark.parametrize(("rows", "total"), [([0, 2, 5], 7), ([0, 1, 2], 3), (list(range(40)), 41)])
@pytest.mark.parametrize("vocab", [64, 100, 2048])
def test_only_the_bits_of_a_mask_are_left(rows: list[int], total: int, vocab: int) -> None:
    logits, where, masks, wanted = case(rows, total, vocab)
    reference.forbid(logits, where, masks)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize(("rows", "total"), [([0, 2, 5], 7), ([0, 1, 2], 3)])
@pytest.mark.parametrize("vocab", [100, 5000])
def test_triton_does_the_same(rows: list[int], total: int, vocab: int) -> None:
    pytest.importorskip("triton")
    from glowplug.kernels.sampling import edits

    logits, where, masks, wanted = case(rows, total, vocab)
    wide = torch.cat([logits, torch.zeros(total, 3)], 1).to(DEVICE)
    edits.forbid(wide[:, :vocab], where.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(wide[:, :vocab].cpu(), wanted)
    assert not wide[:, vocab:].any()
