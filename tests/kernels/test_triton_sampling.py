"""The sampling passes in Triton against the torch kernels: in the interpreter, or on a GPU."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels import sampling as reference
from glowplug.kernels.triton import sampling as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLDEST = 1e-5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row at a vocabulary the interpreter is quick with."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernel, "BLOCK", 64)


def randn(*shape: int, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(DEVICE)


def counters(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("vocab", [1, 63, 64, 150])
def test_best_is_the_first_of_the_largest(vocab: int) -> None:
    arrived = counters(8)
    for seed in (0, 1):
        logits = randn(8, vocab + 3, seed=seed)[:, 3:].round()  # strided rows, many ties
        logits[1], logits[2, vocab // 2], logits[3, -1] = float("-inf"), float("nan"), float("inf")
        logits[4], logits[4, 0] = 0.0, -0.0
        chosen = kernel.best(logits, arrived)
        finite = [0, 4, 5, 6, 7]
        wanted = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert chosen.tokens[finite].tolist() == wanted[finite].tolist()
        assert chosen.bad.tolist() == [row in (1, 2, 3) for row in range(8)]
        assert not arrived.any()


def parameters(rows: Tensor, **columns: list[float]) -> kernel.RowParameters:
    """Of rows in a table of twelve, the others poisoned; columns are strided."""
    floats = torch.full((12, 3), float("nan"), device=DEVICE)
    ints = torch.full((12, 2), -(1 << 62), dtype=torch.int64, device=DEVICE)
    for place, name in enumerate(("temperature", "min_p", "top_p")):
        floats[rows, place] = torch.tensor(columns[name], device=DEVICE)
    ints[rows, 0] = torch.tensor(columns["top_k"], device=DEVICE).long()
    ints[rows, 1] = torch.arange(len(rows), device=DEVICE) * 0x123456789ABCDEF - (1 << 60)
    return kernel.RowParameters(floats[:, 0], floats[:, 1], floats[:, 2], ints[:, 0], ints[:, 1])


@pytest.mark.parametrize("seed", [0, 1])
def test_random_rows_follow_the_reference(seed: int) -> None:
    rows, vocab = torch.tensor([3, 1, 7, 0, 9, 2, 11], device=DEVICE), 150
    logits, arrived = randn(7, vocab, seed=seed), counters(7)
    logits[4] = logits[4].round()  # ties at every cut-off
    given = parameters(rows, temperature=[1.0, 0.7, 0.0, 1.3, 2.0, 1.0, 0.2], min_p=[0, 0.1, 0, 0, 0, 0, 0],
                       top_p=[0.8, 0.9, 0.5, 0.6, 0.7, 1.0, 1.0], top_k=[5, 0, 3, vocab, 20, 40, 0])
    chosen = kernel.best(logits, arrived)
    kernel.cut_off(logits, chosen, rows, given, COLDEST, True, arrived)
    kernel.cut_off(logits, chosen, rows, given, COLDEST, False, arrived)
    cold = given.temperature[rows] < COLDEST
    weights = ((logits - chosen.peaks[:, None]) / given.temperature[rows].masked_fill(cold, 1.0)[:, None]).exp()
    weights[weights < given.min_p[rows, None]] = 0.0
    least = reference.cutoff(weights, given.top_k[rows], given.top_p[rows]).masked_fill(cold, 0.0)
    torch.testing.assert_close(chosen.least.view(torch.float32), least, rtol=1e-6, atol=0)
    weights[weights < least[:, None]] = 0.0
    greedy = chosen.tokens.clone()
    for start in (0, 1 << 40):
        positions = torch.arange(7, device=DEVICE) * 977 + start
        kernel.draw(logits, chosen, rows, positions, given, COLDEST, arrived)
        drawn = reference.draw(weights, reference.uniform(given.seed[rows], positions))
        assert chosen.tokens.tolist() == torch.where(cold, greedy, drawn).tolist()
    assert not arrived.any()
