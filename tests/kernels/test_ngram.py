"""Prompt lookup on random tokens: numpy and Triton against the definition in plain Python."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from glowplug.kernels.speculation import ngram_reference
from glowplug.kernels.speculation.ngram_reference import Lookup
from tests.support import uninterpreted

LOOKUPS = [
    Lookup(3, 1, 1, 4),
    Lookup(1, 1, 1, 1),
    Lookup(5, 2, 1, 7),
    Lookup(4, 4, 3, 5),
    Lookup(6, 1, 4, 3),
]


def by_definition(text: list[int], lookup: Lookup) -> tuple[list[list[int]], int]:
    """Return the branches and matches of a row, by the words of ``ngram_reference``."""
    last = len(text) - 1
    matches = []
    for end in range(last):
        size = 0
        while size < lookup.longest and size <= end and text[end - size] == text[last - size]:
            size += 1
        if size >= lookup.shortest:
            matches.append((size, end))
    branches: list[list[int]] = []
    for _, end in sorted(matches, reverse=True):
        grown = list(text)
        for at in range(end + 1, end + 1 + lookup.steps):
            grown.append(grown[at])
        branch = grown[len(text) :]
        if branch[0] not in [other[0] for other in branches] and len(branches) < lookup.topk:
            branches.append(branch)
    count = len(branches)
    while len(branches) < lookup.topk:
        spare = text[-1]
        if branches:
            spare = min({*range(lookup.topk)} - {branch[0] for branch in branches})
        branches.append([spare] * lookup.steps)
    return branches, count


def rows_of_text(seed: int, columns: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return a table of tokens, the rows to search in another order, and their lengths.

    Behind each row's end are tokens that would match.
    """
    rng = random.Random(seed)
    table = torch.tensor(
        [[rng.randrange(rng.choice((2, 3, 9))) for _ in range(columns)] for _ in range(9)],
        dtype=torch.int32,
    )
    rows = rng.sample(range(9), 6)
    lengths = [1, 2, columns, *(rng.randint(1, columns) for _ in range(3))]
    return table, rows, lengths


def check(
    module: ModuleType, lookup: Lookup, columns: int, device: str = "cpu", seeds: int = 8
) -> None:
    for seed in range(seeds):
        table, rows, lengths = rows_of_text(seed, columns)
        found, matches = module.ngram_branches(
            table.to(device),
            torch.tensor(rows, device=device),
            torch.tensor(lengths, device=device),
            lookup,
        )
        assert found.dtype == torch.int64 and matches.dtype == torch.int32
        assert list(zip(found.tolist(), matches.tolist())) == [
            by_definition(table[row, :length].tolist(), lookup)
            for row, length in zip(rows, lengths)
        ]


@pytest.mark.parametrize("lookup", LOOKUPS, ids=str)
def test_the_reference_follows_the_definition(lookup: Lookup) -> None:
    check(ngram_reference, lookup, 60)


@pytest.mark.parametrize("lookup", LOOKUPS, ids=str)
def test_the_kernel_follows_the_definition(lookup: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are longer than a block and are divided into parts, some of which are empty."""
    pytest.importorskip("triton")
    from glowplug.kernels.speculation import ngram

    monkeypatch.setattr(ngram, "BLOCK", 16)
    monkeypatch.setattr(ngram, "PART_TOKENS", 32)
    check(ngram, lookup, 70, "cuda" if torch.cuda.is_available() else "cpu", seeds=2)


@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_rows_are_known_to_have_matches_without_a_search(shortest: int) -> None:
    for seed in range(20):
        table, rows, lengths = rows_of_text(seed, 20)
        where = torch.tensor(rows), torch.tensor(lengths)
        matches = ngram_reference.ngram_branches(table, *where, Lookup(4, shortest, 1, 1))[1]
        found = ngram_reference.have_matches(table, *where, shortest)
        assert found == (matches > 0).tolist()


def test_a_period_is_continued_behind_the_row() -> None:
    table = torch.tensor([[4, 7, 8, 7, 8, 7, 9, 9]], dtype=torch.int32)
    found, matches = ngram_reference.ngram_branches(
        table, torch.tensor([0]), torch.tensor([6]), Lookup(3, 1, 1, 5)
    )
    assert found.tolist() == [[[8, 7, 8, 7, 8]]] and matches.tolist() == [1]


@pytest.mark.gpu
def test_the_kernel_is_captured_and_follows_lengths_on_the_device() -> None:
    from glowplug.kernels.speculation import ngram

    lookup = Lookup(4, 1, 2, 3)
    table, rows, lengths = rows_of_text(0, 5000)
    held = table.cuda(), torch.tensor(rows).cuda(), torch.tensor(lengths).cuda()
    ngram.ngram_branches(*held, lookup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, matches = ngram.ngram_branches(*held, lookup)
    for seed in (1, 2):
        table, rows, lengths = rows_of_text(seed, 5000)
        for mine, new in zip(held, (table, torch.tensor(rows), torch.tensor(lengths))):
            mine.copy_(new)
        graph.replay()
        expected, counts = ngram_reference.ngram_branches(
            table, torch.tensor(rows), torch.tensor(lengths), lookup
        )
        assert torch.equal(found.cpu(), expected) and torch.equal(matches.cpu(), counts)


SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.speculation import ngram

for topk, size in ((1, 1), (3, 4), (8, 8)):
    for parts in (1, 32):
        rows = dict(table="*i32", rows="*i64", lengths="*i64", keys="*i64")
        build(ngram._search, rows, dict(TOPK=topk, TOPK_SIZE=size, PARTS=parts, BLOCK=ngram.BLOCK))
        build(ngram._merge, {**rows, "branches": "*i64", "matches": "*i32"},
              dict(TOPK=topk, TOPK_SIZE=size, PARTS=parts, KEYS_SIZE=size * parts, STEPS_SIZE=16))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_search", "_merge"] * 6
