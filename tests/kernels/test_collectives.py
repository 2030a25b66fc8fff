"""Collectives over peers' buffers against sums in float32, all ranks in one process.

The stages of a kernel run one after another for all ranks, so that nothing waits for a program that
has not run. Waiting itself is tested on several devices.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.collectives import (  # noqa: E402
    add_norm,
    expert_combine,
    expert_dispatch,
    expert_ids,
    gather,
)
from glowplug.kernels.collectives.all_reduce import RECEIVE, SEND, SUM, one_shot, two_shot  # noqa: E402
from glowplug.kernels.collectives.buffer_sizes import buffer_words  # noqa: E402
from glowplug.kernels.collectives.push import (  # noqa: E402
    EMPTY_BITS,
    PeerBuffers,
    peer_buffers,
)
from glowplug.kernels.elementwise.norm import add_rms_norm as plain_add_rms_norm  # noqa: E402
from glowplug.plugins.parallel.placed_exchange import (  # noqa: E402
    WAYS,
    PlacedExchange,
    slot_table,
)
from tests.support.slow_cases import some_slow, some_slow_rows  # noqa: E402

HALF = torch.float16


@dataclass
class Group:
    """The buffers of all ranks of a group, in one process."""

    memory: list[Tensor]
    buffers: list[PeerBuffers]

    @classmethod
    def of(cls, ranks: int, capacity: int, tile: int, tiles: int = 0) -> Group:
        memory = [
            torch.full(
                (buffer_words(ranks, capacity) // 2,), EMPTY_BITS, dtype=torch.int32, device=DEVICE
            )
            for _ in range(ranks)
        ]
        addresses = [one.data_ptr() for one in memory]
        fault = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        return cls(
            memory,
            [
                peer_buffers(rank, addresses, capacity, tile, fault, tiles=tiles)
                for rank in range(ranks)
            ],
        )

    def empty(self) -> list[int]:
        """Return the numbers of each rank's buffers that hold something."""
        return [int((one != EMPTY_BITS).sum()) for one in self.memory]


def numbers(ranks: int, *shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> list[Tensor]:
    """Return random numbers for each rank, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for _ in range(ranks)]
    for x in found:
        x.view(-1)[::5] = 0.0
        x.view(-1)[1::7] = -0.0
    return found


def summed(given: list[Tensor]) -> Tensor:
    """Return the sum in order of rank, rounded once."""
    total = torch.zeros_like(given[0], dtype=torch.float32)
    for x in given:
        total += x.float()
    return total.to(given[0].dtype)


#: (ranks, numbers); every number of two ranks, and of more those around a tile
SUMS = [(ranks, count) for count in (1, 63, 64, 65, 200, 256) for ranks in (2, 3, 4)]
SLOW_SUMS = [one for one in SUMS if one[0] > 2 and one[1] in (63, 64, 200)] + [(3, 256)]


@pytest.mark.parametrize(("ranks", "count"), some_slow_rows(SUMS, SLOW_SUMS))
@pytest.mark.parametrize(
    "dtypes",
    some_slow([(HALF,), (torch.float32,), (HALF, torch.float32)], [(HALF, torch.float32)]),
)
def test_one_shot_sums_in_order_of_rank(
    ranks: int, count: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    group = Group.of(ranks, 512, 128)
    for call in range(6):
        given = numbers(ranks, count, seed=call, dtype=dtypes[call % len(dtypes)])
        for x, own in zip(given, group.buffers):
            one_shot(x, own, SEND)
        for x, own in zip(given, group.buffers):
            out = torch.empty_like(x)
            assert one_shot(x, own, SUM, out) is out
            assert torch.equal(out, summed(given))


def test_a_call_clears_the_buffers_of_the_call_before() -> None:
    group = Group.of(2, 128, 64)
    for count in (128, 128, 10, 10, 10):
        given = numbers(2, count)
        for stage in (SEND, SUM):
            for x, own in zip(given, group.buffers):
                one_shot(x, own, stage)
    # two numbers a word: the last call's numbers in tile 0, and those of the second call in tile 1
    assert group.empty() == [(10 + 64) // 2] * 2
    assert [own.turns.tolist() for own in group.buffers] == [[2, 2]] * 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 64, 130, 500])
def test_two_shot_sums_in_order_of_rank(ranks: int, count: int) -> None:
    tiles = -(-500 // 64)
    capacity = -(-tiles // ranks) * 64
    terms = Group.of(ranks, capacity, 64, tiles)
    sums = Group.of(ranks, capacity, 64)
    for call in range(4):
        given = numbers(ranks, count, seed=call)
        found = [torch.zeros_like(x) for x in given]
        for stage in (SEND, SUM, RECEIVE):
            for rank, x in enumerate(given):
                two_shot(x, terms.buffers[rank], sums.buffers[rank], stage, found[rank])
        assert all(torch.equal(one, summed(given)) for one in found)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1,), (3, 20), (2, 64)])
def test_gather_and_scatter(ranks: int, shape: tuple[int, ...]) -> None:
    group = Group.of(ranks, 128, 64)
    for call in range(4):
        given = numbers(ranks, *shape, seed=call)
        found = [torch.zeros(ranks, x.numel(), dtype=HALF, device=DEVICE) for x in given]
        for stage in (SEND, SUM):
            for rank, x in enumerate(given):
                whole = found[rank].unsqueeze(0)
                gather.all_gather(x.view(1, -1), whole, group.buffers[rank], stage)
        wanted = torch.stack([x.flatten() for x in given])
        assert all(torch.equal(one, wanted) for one in found)
        terms = numbers(ranks, ranks * shape[0], *shape[1:], seed=call)
        for x, own in zip(terms, group.buffers):
            gather.reduce_scatter(x, own, SEND)
        dtype = (HALF, torch.float32)[call % 2]
        wanted = summed([x.to(dtype) for x in terms]).view(ranks, *shape)
        for rank, x in enumerate(terms):
            found = gather.reduce_scatter(x, group.buffers[rank], SUM, dtype)
            assert torch.equal(found, wanted[rank])


@pytest.mark.parametrize("size", [100, 128, 300])
@pytest.mark.parametrize("parts", [0, 3])
def test_norm_of_the_sum_equals_an_all_reduce_and_a_norm(size: int, parts: int) -> None:
    ranks, rows = 2, 3
    tile = 512
    group = Group.of(ranks, rows * tile, tile)
    weight, residual = numbers(2, size)[0], numbers(1, rows, size, seed=9)[0]
    for call in range(4):
        given = numbers(ranks, rows * max(1, parts), size, seed=call)
        ids = torch.tensor([[0, -1, 2]] * rows, device=DEVICE) if parts else None
        local = given
        if ids is not None:
            local = [
                x.view(rows, parts, size)
                .float()
                .masked_fill((ids < 0)[..., None], 0)
                .sum(1)
                .to(HALF)
                for x in given
            ]
        wanted = plain_add_rms_norm(summed(local), residual, weight, 1e-6)
        for stage in (SEND, SUM):
            for rank, x in enumerate(given):
                plain = torch.empty(rows, size, dtype=HALF, device=DEVICE)
                total = add_norm.add_rms_norm(
                    x,
                    residual,
                    weight,
                    1e-6,
                    group.buffers[rank],
                    ids=ids,
                    plain=plain,
                    stages=stage,
                )
                if stage == SUM:
                    assert torch.equal(total, wanted[1]) and torch.equal(plain, wanted[0])


@pytest.mark.parametrize(("ranks", "within"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize(
    "counts",
    some_slow(
        [(1, 1, 1, 1), (3, 0, 4, 1), (4, 4, 4, 4)],
        [(1, 1, 1, 1), (4, 4, 4, 4)],  # 25 s each
    ),
)
def test_tokens_reach_their_experts_and_return(
    ranks: int, within: int, counts: tuple[int, ...]
) -> None:
    """Each rank's result for an expert is the token times a factor of this expert."""
    hidden, topk, held, rows = 96, 3, 3, 4
    experts = held * ranks // within
    tile = expert_dispatch.row_words(torch.empty(0, hidden, dtype=HALF), topk)
    there, back = Group.of(ranks, rows * tile, tile), Group.of(ranks, rows * tile, tile)
    for call in range(4):
        generator = torch.Generator().manual_seed(call)
        given = numbers(ranks, rows, hidden, seed=call)
        chosen = [
            torch.stack(
                [torch.randperm(experts, generator=generator)[:topk] for _ in range(rows)]
            ).to(DEVICE)
            for _ in range(ranks)
        ]
        chosen[0][0] = torch.tensor([0, 1, 2], device=DEVICE)  # experts of one share only
        weights = [torch.rand(rows, topk, generator=generator).to(DEVICE) for _ in range(ranks)]
        own = [
            (x[:count], ids[:count], factors[:count])
            for x, ids, factors, count in zip(given, chosen, weights, counts)
        ]
        found = [
            expert_dispatch.Dispatched(
                torch.full((ranks * rows, hidden), float("nan"), dtype=HALF, device=DEVICE),
                torch.full((ranks * rows, topk), 99, dtype=torch.int32, device=DEVICE),
                torch.full((ranks * rows, topk), float("nan"), device=DEVICE),
            )
            for _ in range(ranks)
        ]
        for stage in (SEND, SUM):
            for rank in range(ranks):
                expert_dispatch.dispatch(
                    *own[rank],
                    rows,
                    held,
                    there.buffers[rank],
                    within=within,
                    stages=stage,
                    out=found[rank],
                )
        results = []
        for rank, got in enumerate(found):
            share = rank // within
            for source, count in enumerate(counts[:ranks]):
                for row in range(rows):
                    at = source * rows + row
                    ids = (
                        chosen[source][row]
                        if row < count
                        else torch.full((topk,), -1, device=DEVICE)
                    )
                    local = torch.where((ids >= 0) & (ids // held == share), ids % held, -1)
                    assert got.ids[at].tolist() == local.tolist()
                    if (local >= 0).any():
                        assert torch.equal(got.x[at].abs(), given[source][row].abs())
                        assert torch.equal(got.weights[at], weights[source][row])
            used = got.ids >= 0
            factor = torch.where(used, got.weights, 0.0).sum(-1, keepdim=True) / within
            results.append((got.x.float() * factor).to(HALF))
        beside = numbers(ranks, rows, hidden, seed=call + 50)
        for rank in range(ranks):
            expert_combine.combine(
                results[rank],
                found[rank].ids,
                own[rank][1],
                held,
                back.buffers[rank],
                within=within,
                beside=beside[rank][: counts[rank]],
                stages=SEND,
            )
        for rank in range(ranks):
            sums = expert_combine.combine(
                results[rank],
                found[rank].ids,
                own[rank][1],
                held,
                back.buffers[rank],
                within=within,
                beside=beside[rank][: counts[rank]],
                stages=SUM,
            )
            x, _, factors = own[rank]
            assert not sums[len(x) :].any()
            sums = sums[: len(x)]
            wanted = (
                x.float() * factors.sum(-1, keepdim=True) + beside[rank][: counts[rank]].float()
            )
            torch.testing.assert_close(sums.float(), wanted, atol=2e-2, rtol=1e-2)


ARRIVALS = list(itertools.product((HALF, torch.float32, torch.float8_e4m3fn), (0, 1, 5, 6)))


@pytest.mark.parametrize(
    ("dtype", "count"),
    some_slow_rows(ARRIVALS, [one for one in ARRIVALS if one[0].itemsize > 1 and one[1] in (0, 5)]),
)
def test_tokens_arrive_bit_by_bit_in_every_dtype(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have more rows than a launch has programs, and strided ids, weights and scales."""
    monkeypatch.setattr(expert_dispatch, "PROGRAMS_MAX", 2)
    ranks, rows, hidden, topk, held = 2, 6, 260, 2, 3
    groups = 3 if dtype.itemsize == 1 else 0
    generator = torch.Generator().manual_seed(count)
    given = [torch.randn(rows, hidden, generator=generator).to(DEVICE, dtype) for _ in range(ranks)]
    scales = [torch.rand(3, 8, generator=generator).to(DEVICE).t()[:rows] for _ in range(ranks)]
    wide = [torch.randint(0, held * ranks, (rows, 4), generator=generator) for _ in range(ranks)]
    chosen = [ids.to(DEVICE)[:, :topk] for ids in wide]
    weights = [torch.rand(rows, 4, generator=generator).to(DEVICE)[:, :topk] for _ in range(ranks)]
    tile = expert_dispatch.row_words(given[0], topk, groups)
    group = Group.of(ranks, rows * tile, tile)
    for _ in range(4):
        found: list[expert_dispatch.Dispatched | None] = [None] * ranks
        for stage in (SEND, SUM):
            for rank, own in enumerate(group.buffers):
                found[rank] = expert_dispatch.dispatch(
                    given[rank][:count],
                    chosen[rank][:count],
                    weights[rank][:count],
                    rows,
                    held,
                    own,
                    scales=scales[rank][:count] if groups else None,
                    stages=stage,
                )
        for rank, got in enumerate(found):
            assert got is not None and got.x.dtype == dtype
            for source in range(ranks):
                for row in range(rows):
                    at = source * rows + row
                    ids = chosen[source][row] if row < count else torch.full((topk,), -1)
                    local = torch.where(ids // held == rank, ids % held, -1)
                    assert got.ids[at].tolist() == local.tolist()
                    if (local >= 0).any():
                        assert torch.equal(got.x[at].float(), given[source][row].float())
                        assert torch.equal(got.weights[at], weights[source][row])
                        if got.scales is not None:
                            assert torch.equal(got.scales[at], scales[source][row])


@pytest.mark.parametrize(
    ("dtype", "columns"),
    some_slow_rows(
        itertools.product((HALF, torch.float32), (1, 60, 64, 130)),
        [(HALF, 64), (HALF, 130), (torch.float32, 1)],
    ),
)
def test_rows_are_gathered_side_by_side(columns: int, dtype: torch.dtype) -> None:
    ranks, rows = 3, 4
    group = Group.of(ranks, 4096, 128)
    for call in range(4):
        given = numbers(ranks, rows, columns, seed=call, dtype=dtype)
        found = [
            torch.zeros(rows, ranks, columns, dtype=dtype, device=DEVICE) for _ in range(ranks)
        ]
        for stage in (SEND, SUM):
            for rank, x in enumerate(given):
                gather.all_gather(x, found[rank], group.buffers[rank], stage)
        assert all(torch.equal(one, torch.stack(given, 1)) for one in found)


@pytest.mark.parametrize("copies", [0, 5])
def test_ids_become_slots_in_the_same_launch(copies: int) -> None:
    """They are those of ``PlacedExchange``, the reference; some ids are -1, and some tokens are
    padding.
    """
    experts, topk = 11, 3
    slots = [*range(experts), *(7 * one % experts for one in range(copies))]
    ways = WAYS if copies else 1
    table = torch.tensor(slot_table(slots, experts, ways), device=DEVICE)
    generator = torch.Generator().manual_seed(copies)
    ids = torch.randint(-1, experts, (70, topk), generator=generator).to(DEVICE)
    ids[3] = -1
    padding = torch.rand(70, 1, generator=generator).to(DEVICE) < 0.2
    placed = PlacedExchange(slots, experts, DEVICE, cast(Any, SimpleNamespace(combine=None)))
    wanted = placed.slots_of(ids).masked_fill(padding, -1)
    counts = torch.zeros(len(slots), dtype=torch.int64, device=DEVICE)
    found = expert_ids.rank_ids(
        ids, 0, len(slots), padding, counts, slice(0, 70), slots=(table, ways)
    )
    assert found.tolist() == wanted.tolist()
    chosen = wanted[wanted >= 0].cpu()
    assert counts.tolist() == torch.bincount(chosen, minlength=len(slots)).tolist()
    half = expert_ids.rank_ids(ids, 4, 5, slots=(table, ways)).long()
    own = placed.slots_of(ids) - 4
    assert torch.equal(half, own.masked_fill((own < 0) | (own >= 5), -1))


def test_rows_that_fit_fill_whole_tiles() -> None:
    (buffers,) = Group.of(2, 1024, 128).buffers[:1]
    assert gather.rows_that_fit(torch.empty(9, 128, dtype=HALF), buffers) == 8
    assert gather.rows_that_fit(torch.empty(9, 129, dtype=HALF), buffers) == 4
    assert gather.rows_that_fit(torch.empty(9, 64), buffers) == 8
    assert gather.rows_that_fit(torch.empty(9, 2000, dtype=HALF), buffers) == 0
    assert gather.rows_that_fit(torch.empty(9, 64, dtype=torch.int64), buffers) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
@pytest.mark.parametrize("padded", [False, True])
def test_ids_of_a_rank_are_those_of_plain_torch(
    dtype: torch.dtype, tokens: int, padded: bool
) -> None:
    """Rows and padding are strided; some ids are -1, and some tokens are counted."""
    experts, topk, first, held = 16, 6, 4, 5
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randint(-1, experts, (tokens, topk + 2), generator=generator).to(DEVICE, dtype)
    ids = wide[:, :topk]
    padding = torch.rand(tokens, 2, generator=generator).to(DEVICE)[:, :1] < 0.3 if padded else None
    counts = torch.ones(experts, dtype=torch.int64, device=DEVICE)
    counted = slice(1, max(1, tokens - 2))
    found = expert_ids.rank_ids(ids, first, held, padding, counts, counted)
    chosen = ids.long() if padding is None else ids.long().masked_fill(padding, -1)
    inside = (chosen >= first) & (chosen < first + held)
    assert found.tolist() == torch.where(inside, chosen - first, -1).tolist()
    own = chosen[counted]
    wanted = 1 + torch.bincount(own[own >= 0].flatten().cpu(), minlength=experts)
    assert counts.tolist() == wanted.tolist()
    without = expert_ids.rank_ids(ids, 0, experts)
    assert torch.equal(without.long(), ids.long())
