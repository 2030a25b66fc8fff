"""The sampling kernels against definitions in plain Python and numpy, over odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.kernels.launch.chunks import LOGPROB_ROWS
from glowplug.kernels.sampling import reference as sampling

MASK = (1 << 64) - 1
SIZES = (1, 2, 255, 256, 257, 1000, 5003)


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix64((seed + (stream + 1) * golden) & MASK)
    return (splitmix64((key + position * golden) & MASK) >> 11) * 2.0**-53


def test_uniform_is_splitmix64() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(-(1 << 63), (1 << 63) - 1, 200)
    positions = generator.integers(0, 1 << 40, 200)
    for stream in (0, 1, 5):
        got = sampling.uniform(
            torch.from_numpy(seeds), torch.from_numpy(positions), stream
        ).tolist()
        assert got == [
            uniform(int(s), int(p), stream) for s, p in zip(seeds, positions, strict=True)
        ]


def test_uniform_is_uniform_along_positions_seeds_and_streams() -> None:
    count = 100_000
    steps, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for u in (
        sampling.uniform(zeros, steps),
        sampling.uniform(steps, zeros),
        sampling.uniform(steps, zeros, 1),
    ):
        counts = torch.histc(u.float(), 100, 0.0, 1.0)
        statistic = ((counts - count / 100) ** 2 / (count / 100)).sum().item()
        assert statistic < 170  # 99 degrees of freedom: about one in a hundred thousand
        lagged = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1].abs().item()
        assert lagged < 0.02


@pytest.mark.parametrize("vocab", SIZES)
def test_draw_is_the_inverse_of_the_cumulative_sum(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(50, vocab, generator=generator) * (
        torch.rand(50, vocab, generator=generator) < 0.4
    )
    weights[:, vocab // 2] += 0.1
    u = torch.rand(50, generator=generator, dtype=torch.float64)
    u[0], u[1], u[2] = 0.0, 1.0 - 2.0**-53, 0.5
    cumulative = weights.double().cumsum(-1)
    drawn = sampling.draw(weights, u)
    assert (weights.gather(1, drawn[:, None]) > 0).all()
    target = u * cumulative[:, -1]
    low = cumulative.gather(1, drawn[:, None])[:, 0] - weights.gather(1, drawn[:, None])[:, 0]
    high = cumulative.gather(1, drawn[:, None])[:, 0]
    slack = cumulative[:, -1] * 1e-12
    assert (target >= low - slack).all() and (target < high + slack).all()


def test_draw_of_extremes() -> None:
    one = torch.zeros(3, 700)
    one[0, 0] = one[1, 699] = one[2, 256] = 1e-30
    for value in (0.0, 0.3, 1.0 - 2.0**-53):
        assert sampling.draw(one, torch.full((3,), value, dtype=torch.float64)).tolist() == [
            0,
            699,
            256,
        ]
    broken = torch.full((2, 700), float("nan"))
    broken[1] = 0.0
    drawn = sampling.draw(broken, torch.full((2,), 0.7, dtype=torch.float64))
    assert ((drawn >= 0) & (drawn < 700)).all()


@pytest.mark.parametrize("vocab", SIZES)
def test_cutoff_keeps_the_smallest_sufficient_set(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = sampling.SORT_ROWS + 7
    weights = torch.randn(rows, vocab, generator=generator).mul(2).exp()
    top_k = torch.randint(0, vocab + 3, (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator).clamp(min=0.01)
    top_p[::3] = 1.0
    least = sampling.cutoff(weights, top_k, top_p)
    for row in range(rows):
        ordered = np.sort(weights[row].double().numpy())[::-1]
        if top_k[row]:
            ordered = ordered[: int(top_k[row])]
        if top_p[row] < 1:
            share = np.cumsum(ordered)
            ordered = ordered[: int(np.sum(share < float(top_p[row]) * share[-1])) + 1]
        assert int((weights[row] >= least[row]).sum()) == len(ordered)


def test_cutoff_treats_ties_alike() -> None:
    weights = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert sampling.cutoff(weights, torch.tensor([2, 1]), torch.ones(2)).tolist() == [0.5, 1.0]
    assert sampling.cutoff(
        weights, torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, 0.3])
    ).tolist() == [0.5, 1.0]


def test_token_logprobs_in_chunks() -> None:
    generator = torch.Generator().manual_seed(3)
    for rows in (0, 1, LOGPROB_ROWS, 2 * LOGPROB_ROWS + 5):
        logits = torch.randn(rows, 300, generator=generator) * 4
        tokens = torch.randint(0, 300, (rows,), generator=generator)
        token, top_ids, top = sampling.token_logprobs(logits, tokens, 4)
        expected = logits.double().log_softmax(-1)
        torch.testing.assert_close(
            token.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(top.double(), expected.topk(4).values, atol=1e-5, rtol=0)
        assert torch.equal(top_ids, expected.topk(4).indices)
    _, ids, _ = sampling.token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 20)
    assert ids.shape == (2, 3)


def damaged_logits(rows: int, vocab: int) -> torch.Tensor:
    """Return logits with ties, both zeros, and rows with infinite values and NaN."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator).mul(3).round()
    logits[1] = float("-inf")
    logits[2, vocab // 2 :] = float("nan")
    logits[3, -1] = float("inf")
    logits[4] = 0.0
    logits[4, vocab // 2] = -0.0
    logits[5, : vocab // 3] = float("-inf")
    logits[6] = -1e-45
    logits[7, vocab // 2] = -float("nan")
    logits[8] = -3e38
    return logits


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("vocab", [1, 2, 9, 158, 1000])
def test_the_best_of_slices_is_the_best_of_all(vocab: int, parts: int) -> None:
    logits = damaged_logits(20, vocab)
    each = -(-vocab // parts)
    starts = range(0, vocab, each)
    keys = torch.stack([sampling.best_keys(logits[:, at : at + each], at) for at in starts])
    tokens, bad = sampling.best_of_keys(keys)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(bad, ~logits.gather(1, tokens[:, None])[:, 0].isfinite())
    assert bad[1] and bad[2] and not bad[4]


def test_no_half_of_a_key_marks_an_empty_buffer() -> None:
    """Collectives through peers' memory would change these bits (kernels/collectives/push.py)."""
    bits = torch.tensor([-0x7FFF8000, -0x7FFF7FFF, 0x7FFF7FFF, -0x8001, 0x8000, -1, 0x7FC00000])
    values = torch.cat([bits.int().view(torch.float32), torch.tensor([0.0, -0.0])])[:, None]
    for first in (0, 1, 0x7FFF, 0x8000, 200_000):
        halves = sampling.best_keys(values, first).view(torch.int32)
        assert not (halves == -0x7FFF8000).any()
