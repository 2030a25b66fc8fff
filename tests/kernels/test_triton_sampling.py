"""The sampling passes in Triton against the torch kernels: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.sampling import (
    edits as sampling_edits,
    logprobs as sampling_scores,
    reference,
    vocabulary_blocks,
)
from glowplug.kernels.sampling.cut_off import cut_off
from glowplug.kernels.sampling.draw import draw
from glowplug.kernels.sampling.greedy import best, best_edited, best_keys, best_of_keys
from glowplug.kernels.sampling.vocabulary_blocks import RowParameters
from tests.support import uninterpreted
from tests.support.slow_cases import some_slow, some_slow_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLDEST = 1e-5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a vocabulary that is quick to interpret has several a row."""
    if DEVICE == "cpu":
        monkeypatch.setattr(vocabulary_blocks, "PROGRAM_TOKENS", 64)


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
        chosen = best(logits, arrived)
        finite = [0, 4, 5, 6, 7]
        wanted = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert chosen.tokens[finite].tolist() == wanted[finite].tolist()
        assert chosen.bad.tolist() == [row in (1, 2, 3) for row in range(8)]
        assert not arrived.any()


SLICES = [(vocab, parts) for vocab in (2, 150, 400) for parts in (1, 3, 8)]


@pytest.mark.parametrize(
    ("vocab", "parts"), some_slow_rows(SLICES, [(150, 1), (150, 3), (400, 1), (400, 8)])
)
def test_the_best_of_slices_follows_the_reference(vocab: int, parts: int) -> None:
    arrived = counters(70)
    logits = randn(70, vocab, seed=parts).round()
    logits[1], logits[2, vocab // 2], logits[3, -1] = float("-inf"), float("nan"), float("inf")
    logits[4], logits[4, 0] = 0.0, -0.0
    each = -(-vocab // parts)
    starts = range(0, vocab, each)
    slices = [logits[:, at : at + each] for at in starts]
    keys = torch.stack([best_keys(part, at, arrived) for part, at in zip(slices, starts)])
    wanted = torch.stack([reference.best_keys(part, at) for part, at in zip(slices, starts)])
    assert torch.equal(keys, wanted) and not arrived.any()
    for got, found in zip(best_of_keys(keys), reference.best_of_keys(keys), strict=True):
        assert torch.equal(got, found)
    assert best_of_keys(keys[:, :0])[0].shape == (0,)


COMPILED = """
from tests.support.compiled import build
from glowplug.kernels.sampling import greedy

kinds = dict(logits="*fp32", block_keys="*i64", arrived="*i32", keys="*i64")
for blocks in (2, 64):
    build(greedy._best_keys, kinds, dict(BLOCK=2048, BLOCKS=blocks, DEPENDENT=True))
for ranks in (2, 8):
    build(greedy._best_of_keys, dict(keys="*i64", tokens="*i64", bad="*i1"),
          dict(BLOCK=greedy.ROWS_OF_KEYS, RANKS=ranks, DEPENDENT=True))
"""


def test_the_kernels_over_slices_compile_for_hopper() -> None:
    assert len(uninterpreted.printed("-c", COMPILED).split()) == 4


def parameters(rows: Tensor, **columns: list[float]) -> RowParameters:
    """Return parameters of rows in a table of twelve, the others poisoned; columns are strided."""
    floats = torch.full((12, 3), float("nan"), device=DEVICE)
    ints = torch.full((12, 2), -(1 << 62), dtype=torch.int64, device=DEVICE)
    for place, name in enumerate(("temperature", "min_p", "top_p")):
        floats[rows, place] = torch.tensor(columns[name], device=DEVICE)
    ints[rows, 0] = torch.tensor(columns["top_k"], device=DEVICE).long()
    ints[rows, 1] = torch.arange(len(rows), device=DEVICE) * 0x123456789ABCDEF - (1 << 60)
    return RowParameters(floats[:, 0], floats[:, 1], floats[:, 2], ints[:, 0], ints[:, 1])


@pytest.mark.parametrize("seed", some_slow([0, 1], [1]))
def test_random_rows_follow_the_reference(seed: int) -> None:
    rows, vocab = torch.tensor([3, 1, 7, 0, 9, 2, 11], device=DEVICE), 150
    logits, arrived = randn(7, vocab, seed=seed), counters(7)
    logits[4] = logits[4].round()  # ties at every cut-off
    given = parameters(
        rows,
        temperature=[1.0, 0.7, 0.0, 1.3, 2.0, 1.0, 0.2],
        min_p=[0, 0.1, 0, 0, 0, 0, 0],
        top_p=[0.8, 0.9, 0.5, 0.6, 0.7, 1.0, 1.0],
        top_k=[5, 0, 3, vocab, 20, 40, 0],
    )
    chosen = best(logits, arrived)
    cut_off(logits, chosen, rows, given, COLDEST, True, arrived)
    cut_off(logits, chosen, rows, given, COLDEST, False, arrived)
    cold = given.temperature[rows] < COLDEST
    weights = (
        (logits - chosen.peaks[:, None]) / given.temperature[rows].masked_fill(cold, 1.0)[:, None]
    ).exp()
    weights[weights < given.min_p[rows, None]] = 0.0
    least = reference.cutoff(weights, given.top_k[rows], given.top_p[rows]).masked_fill(cold, 0.0)
    torch.testing.assert_close(chosen.least.view(torch.float32), least, rtol=1e-6, atol=0)
    weights[weights < least[:, None]] = 0.0
    greedy = chosen.tokens.clone()
    for start in (0, 1 << 40):
        positions = torch.arange(7, device=DEVICE) * 977 + start
        draw(logits, chosen, rows, positions, given, COLDEST, arrived)
        drawn = reference.draw(weights, reference.uniform(given.seed[rows], positions))
        assert chosen.tokens.tolist() == torch.where(cold, greedy, drawn).tolist()
    assert not arrived.any()


def test_cut_offs_where_blocks_drop_out() -> None:
    """There are several blocks, few of which hold the searched values: a flat row, a steep one,
    ties, equal weights.
    """
    rows, vocab = torch.arange(5, device=DEVICE), 257 if DEVICE == "cpu" else 50_001
    logits, arrived = randn(5, vocab, seed=4), counters(5)
    logits[0], logits[1], logits[2], logits[3] = (
        logits[0] * 0.01,
        logits[1] * 20,
        logits[2].round(),
        1.5,
    )
    top_k, top_p = [0, 30, vocab // 2, 13, vocab - 1], [0.9, 0.5, 1.0, 0.3, 0.999]
    given = parameters(
        rows, temperature=[1.0, 0.5, 2.0, 1.0, 0.7], min_p=[0.0] * 5, top_p=top_p, top_k=top_k
    )
    chosen = best(logits, arrived)
    for count in (True, False):
        cut_off(logits, chosen, rows, given, COLDEST, count, arrived)
    weights = ((logits - chosen.peaks[:, None]) / given.temperature[rows][:, None]).exp().double()
    least = chosen.least.view(torch.float32).double()
    for row in range(5):
        ordered = weights[row].sort(descending=True).values
        kth = ordered[top_k[row] - 1] if top_k[row] else 0.0
        mass = ordered[ordered >= kth * (1 - 2e-6)]
        assert least[row] >= kth * (1 - 2e-6)
        if top_p[row] == 1.0:
            assert least[row] <= kth * (1 + 2e-6)
            continue
        left, fewer = (
            float(mass[mass > least[row] * factor].sum() / mass.sum())
            for factor in (1 - 2e-6, 1 + 2e-6)
        )
        assert left >= top_p[row] - 1e-5, "too little was left"
        assert fewer < top_p[row] + 1e-5, "the cut-off could be higher"
    assert not arrived.any()


def columns(count: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return columns of one table, which are strided."""
    table = torch.zeros(rows, count + 1, dtype=dtype, device=DEVICE)
    return [table[:, i] for i in range(count)]


def edits(vocab: int, seed: int) -> sampling_edits.RowEdits:
    """Return twelve rows with penalties, allowed tokens and lists in every mixture; values without
    their flag are poisoned.
    """
    rng = torch.Generator().manual_seed(seed)
    flags, min_length, added, listed = columns(4, 12, torch.int64)
    repetition, frequency, presence = columns(3, 12, torch.float32)
    table = torch.randint(0, 4, (12, vocab), generator=rng, dtype=torch.int32)
    table |= (
        torch.randint(0, 2, (12, vocab), generator=rng, dtype=torch.int32)
        * sampling_edits.IN_PROMPT
    )
    ids = torch.stack([torch.randperm(vocab, generator=rng)[:100] for _ in range(12)]).int()
    values = torch.randn(12, 100, generator=rng)
    for row in range(12):
        flags[row] = row % 8
        min_length[row], added[row], listed[row] = 50 + row, 70, 75
        repetition[row], frequency[row], presence[row] = 1.3, 0.1 * row, -0.7
        values[row, 70:75] = float("-inf")
        if row & sampling_edits.ALLOWED:
            table[row, ::3] |= sampling_edits.FORBIDDEN
        if not row & sampling_edits.LISTED:
            added[row] = listed[row] = 99
        if not row & sampling_edits.PENALTIES:
            repetition[row] = float("nan")
    return sampling_edits.RowEdits(
        flags,
        min_length,
        added,
        listed,
        repetition,
        frequency,
        presence,
        ids.to(DEVICE),
        values.to(DEVICE),
        table.to(DEVICE),
    )


def naive_edit(
    logits: Tensor, row: int, position: int, ahead: list[int], given: sampling_edits.RowEdits
) -> Tensor:
    logits, flags, held = logits.clone(), int(given.flags[row]), given.table[row].clone()
    if flags & sampling_edits.LISTED:
        last = 75 if position < int(given.min_length[row]) else 70
        logits[given.ids[row, :last].long()] += given.values[row, :last]
    banned = held < 0
    if flags & sampling_edits.PENALTIES:
        held &= 0x7FFFFFFF
        for token in ahead:
            if token >= 0:
                held[token] += 1
        count = held & (sampling_edits.IN_PROMPT - 1)
        one = slice(row, row + 1)
        logits = reference.apply_penalties(
            logits[None],
            (held != 0)[None],
            count[None],
            given.repetition[one],
            given.frequency[one],
            given.presence[one],
        )[0]
    if flags & (sampling_edits.PENALTIES | sampling_edits.ALLOWED):
        logits = logits.masked_fill(banned, float("-inf"))
    return logits


@pytest.mark.parametrize(("vocab", "width"), [(101, 0), (150, 3), (257, 1)])
def test_edits_follow_the_reference(vocab: int, width: int) -> None:
    given, rows = edits(vocab, width), torch.tensor([7, 0, 3, 1, 11, 2, 5, 6, 4], device=DEVICE)
    arrived, ahead = counters(9), None
    for seed in (0, 1):
        logits = randn(9, vocab + 1, seed=seed)[:, 1:]  # strided rows
        positions = torch.arange(9, device=DEVICE) * 12
        if width:
            ahead = torch.randint(
                -1, vocab, (9, width), generator=torch.Generator().manual_seed(seed)
            ).to(DEVICE)
        wanted = torch.stack(
            [
                naive_edit(
                    logits[i],
                    int(rows[i]),
                    int(positions[i]),
                    [] if ahead is None else ahead[i].tolist(),
                    given,
                )
                for i in range(9)
            ]
        )
        chosen = best_edited(logits, arrived, rows, positions, ahead, given)
        assert torch.equal(logits, wanted)
        assert chosen.tokens.tolist() == wanted.argmax(-1).tolist() and not chosen.bad.any()
        assert torch.equal(chosen.peaks, wanted.amax(-1)) and not arrived.any()


def test_observed_tokens_are_counted_for_rows_with_penalties() -> None:
    given, rows = edits(150, 0), torch.tensor([7, 0, 5, 2], device=DEVICE)
    tokens = torch.tensor([[3, 3, 9], [1, 2, 3], [149, 0, 0], [4, 4, 4]], device=DEVICE)
    wanted = given.table.clone()
    for row, accepted in ((7, [3, 3]), (5, [149])):
        for token in accepted:
            wanted[row, token] += 1
    counts = torch.tensor([2, 3, 1, 3], dtype=torch.int32, device=DEVICE)
    sampling_edits.observe(tokens, counts, rows, given)
    assert torch.equal(given.table, wanted)


@pytest.mark.parametrize(("vocab", "k"), [(1, 20), (65, 0), (150, 20)])
def test_log_probabilities(vocab: int, k: int) -> None:
    logits, arrived = randn(5, vocab + 2, seed=3)[:, 2:] * 5, counters(5)
    logits[1, : vocab // 2] = float("-inf")
    chosen = best(logits, arrived)
    tokens = torch.full((5,), vocab - 1, device=DEVICE)
    found = sampling_scores.token_logprobs(logits, tokens, chosen.peaks, k, arrived)
    token, top_ids, top = reference.token_logprobs(logits, tokens, k)
    torch.testing.assert_close(found[0], token, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], top, atol=2e-5, rtol=1e-5)
    tied = torch.isinf(top)
    assert torch.equal(found[1].masked_fill(tied, 0), top_ids.masked_fill(tied, 0))
    assert not arrived.any()
