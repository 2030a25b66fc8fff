"""Kernels around chains of drafts: places, acceptance and kept tokens, against their references."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from glowplug.core.speculation.simulated import chain_draws
from glowplug.kernels.speculation import (
    chain_places_reference,
    pending_entries_reference,
    settle_chains_reference,
)
from glowplug.kernels.speculation.pending_entries_reference import Pending
from glowplug.kernels.speculation.settle_chains_reference import ChainStep, RowStates
from tests.support import uninterpreted

ROWS, PAGES, COLUMNS = 7, 40, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 4), (1, 4, 16), (3, 2, 1), (5, 8, 4), (4, 6, 64)]  #: rows, width, page size
HIDDEN = [1, 24, 40]


class Sample(NamedTuple):
    """Random inputs of a step of D rows."""

    rows: Tensor
    computed: Tensor
    table: Tensor
    bounds: Tensor


def sample(seed: int, count: int, width: int, page: int) -> Sample:
    """Return rows whose lengths reach to the end of their pages; bounds may lie above them."""
    make = torch.Generator().manual_seed(seed)
    rows = torch.randperm(ROWS, generator=make)[:count]
    most = COLUMNS * page
    computed = torch.randint(1, max(2, most), (ROWS,), generator=make, dtype=torch.int32)
    computed[rows[0]] = most
    table = torch.randint(0, PAGES, (count, COLUMNS + 2), generator=make, dtype=torch.int32)
    above = torch.randint(-1, 3, (count,), generator=make, dtype=torch.int32)
    bounds = (computed[rows] + width + above).clamp(min=width + 1)
    return Sample(rows, computed, table[:, :COLUMNS], bounds)


@pytest.mark.parametrize("passes", [0, 1, 3, 9])
@pytest.mark.parametrize(("count", "width", "page"), SIZES)
def test_places_are_those_of_the_reference(count: int, width: int, page: int, passes: int) -> None:
    pytest.importorskip("triton")
    from glowplug.kernels.speculation import chain_places

    given = sample(width, count, width, page)
    results = []
    for module, device in ((chain_places_reference, "cpu"), (chain_places, DEVICE)):
        rows, computed, table, bounds = (part.to(device) for part in given)
        lengths = bounds.clone()
        positions, slots = torch.full((2, count * width), -1, device=device)
        made = module.place_chains(rows, computed, table, page, positions, slots, lengths, passes)
        results.append([part.tolist() for part in (positions, slots, lengths, *made)])
        if module is chain_places:
            fields = (*made.positions, *made.kv_slots, *made.kv_lens)
            assert all(one.data_ptr() % 16 == 0 and one.is_contiguous() for one in fields)
    assert results[0] == results[1]
    assert results[0][2] == torch.minimum(given.computed[given.rows] + width, given.bounds).tolist()


def chain_step(seed: int, count: int, width: int, page: int, hidden: int) -> ChainStep:
    """Return a step in which any number of drafts is accepted, with few bad logits."""
    make = torch.Generator().manual_seed(seed)
    fed = torch.randint(0, 2, (count, width), generator=make)
    drawn = torch.randint(0, 2, (count, width), generator=make)
    starts = torch.randint(1, 3 * page + 2, (count, 1), generator=make)
    positions = starts + torch.arange(width)
    # rows have pages of their own, as in a pool
    pages = torch.randperm(PAGES - 1, generator=make)[: count * COLUMNS].view(count, COLUMNS) + 1
    slots = pages.gather(1, positions // page % COLUMNS) * page + positions % page
    states = torch.randn(count * width, hidden + 3, generator=make)[:, :hidden]
    return ChainStep(
        fed,
        drawn,
        torch.rand(count * width, generator=make) < 0.1,
        torch.randperm(ROWS, generator=make)[:count],
        positions.view(-1),
        slots.view(-1),
        states,
    )


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(("count", "width", "page"), SIZES)
def test_steps_settle_like_the_reference(
    count: int, width: int, page: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from glowplug.kernels.speculation import settle_chains

    monkeypatch.setattr(settle_chains, "BLOCK_MAX", 16)
    seen = set()
    for seed in range(4):
        step = chain_step(seed, count, width, page, hidden)
        results = []
        for module, device in ((settle_chains_reference, "cpu"), (settle_chains, DEVICE)):
            states = RowStates(
                torch.full((ROWS,), -1, device=device),
                torch.zeros(ROWS, hidden, device=device),
                torch.zeros(ROWS, dtype=torch.int32, device=device),
                torch.zeros(PAGES, hidden, device=device),
            )
            own = ChainStep(*(part.to(device) for part in step))
            made = module.settle_chains(own, states, page, 2 * page + 3)
            results.append([part.cpu() for part in (*made, *states)])
        assert all(map(torch.equal, *results))
        assert [a.dtype for a in results[0]] == [b.dtype for b in results[1]]
        seen |= set(results[0][0].tolist())
    assert len(seen) == 1 if width == 1 else len(seen) > 1


@pytest.mark.parametrize("rates", [(), (0.0,), (1.0, 0.5), (0.7, 0.7, 0.7)])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (1, 4), (300, 2), (300, 5)])
def test_simulated_chains_are_those_of_the_reference(
    count: int, width: int, rates: tuple[float, ...]
) -> None:
    pytest.importorskip("triton")
    from glowplug.kernels.speculation import simulated_chains

    make = torch.Generator().manual_seed(width)
    drawn, fed = (torch.randint(0, 3, (count, width), generator=make) for _ in range(2))
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=make)
    positions = torch.randint(0, 2**20, (count, width), generator=make)[:, 0]
    shares = torch.tensor(rates[: width - 1], dtype=torch.float64).cumprod(0)
    given = drawn, fed, shares, keys, positions
    found = simulated_chains.simulated_chains(*(part.to(DEVICE) for part in given))
    assert torch.equal(found.cpu(), chain_draws(*given))
    if count > 1 and width > len(rates) > 1:
        assert (found.cpu()[:, 0] == fed[:, 1]).any() and not torch.equal(found.cpu(), drawn)


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_kept_tokens_are_those_of_the_reference(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several steps of the same rows fill places of their own, behind which they begin again."""
    pytest.importorskip("triton")
    from glowplug.kernels.speculation import pending_entries

    monkeypatch.setattr(pending_entries, "BLOCK_MAX", 16)
    capacity, hidden = 15, 24
    make = torch.Generator().manual_seed(count)
    rows = torch.randperm(ROWS, generator=make)[:count]
    starts = torch.randint(0, 90, (count,), generator=make)
    held = [
        Pending(
            torch.zeros(3, capacity, dtype=torch.int64, device=device),
            torch.zeros(capacity, hidden, device=device),
        )
        for device in ("cpu", DEVICE)
    ]
    for step in range(capacity // count + 1):
        last = torch.randint(0, 99, (ROWS,), generator=make)
        state = torch.randn(ROWS, hidden, generator=make)
        slots = torch.randint(0, 99, (count,), generator=make)
        parts = rows, last, state, starts + step, slots
        pending_entries_reference.keep_newest(held[0], *parts)
        pending_entries.keep_newest(held[1], *(part.to(DEVICE) for part in parts))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(*held))
    rounds = capacity // count
    ends = sorted(held[0].tokens[1][: rounds * count].tolist())
    assert ends == sorted(
        start + step for start in starts.tolist() for step in range(1, rounds + 1)
    )


SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.speculation import chain_places, pending_entries, settle_chains

long = {name: "*i64" for name in ("rows", "positions", "kv_slots", "pass_positions", "pass_slots",
    "fed", "drawn", "last", "lacking_tokens", "lacking_positions", "lacking_slots", "kept")}
short = {name: "*i32" for name in ("computed", "table", "kv_lens", "pass_lens", "query_starts",
    "counts")}
kinds = {**long, **short, "bad": "*i1", "row_bad": "*i1"}
states = {name: "*bf16" for name in ("hidden", "state", "page_ends", "lacking_hidden")}
for width in (1, 2, 8):
    build(chain_places._place, kinds, dict(WIDTH=width))
    build(settle_chains._settle, {**kinds, **states},
          dict(WIDTH=width, WIDTH_SIZE=width, BLOCK=1024))
build(pending_entries._keep, {**kinds, **states}, dict(BLOCK=1024))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    names = uninterpreted.printed("-c", SCRIPT).split()
    assert names == ["_place", "_settle"] * 3 + ["_keep"]
