"""Page tables over smaller pages: their contents, their addresses, and the bytes planned for
them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.plugins.attention.shared import table_bytes
from glowplug.plugins.attention.shared.page_tables import GraphBuffers

CPU = torch.device("cpu")


def batch(seed: int, rows: int, columns: int, page: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 5000, (rows, columns), generator=generator, dtype=torch.int32)
    return table, torch.randint(
        0, columns * page + 1, (rows,), generator=generator, dtype=torch.int32
    )


def kv_slots_of(table: Tensor, page: int) -> Tensor:
    """Return the KV slot of every position of each row, by the definition of a page table."""
    return torch.tensor(
        [
            [int(row[at // page]) * page + at % page for at in range(len(row) * page)]
            for row in table
        ],
        dtype=torch.int32,
    )


def roomy(rows: int, positions: int, page: int) -> GraphBuffers:
    made = GraphBuffers()
    made.reserve(table_bytes.shifted_bytes(DecodingRows(rows, positions, page, 2, 16, True)), CPU)
    return made


@pytest.mark.parametrize("reserved", [True, False])
@pytest.mark.parametrize("graph", [None, "a"])
@pytest.mark.parametrize(("page", "first"), [(1, 1), (16, 1), (64, 1), (16, 3)])
def test_slots_begin_behind_the_first_key(
    page: int, first: int, graph: str | None, reserved: bool
) -> None:
    buffers = roomy(6, 9 * page, page) if reserved else GraphBuffers()
    for seed in range(3):
        table, lens = batch(seed, 6, 9, page)
        kv_slots, behind = buffers.shifted(graph, table, lens, first, page)
        assert kv_slots.dtype == behind.dtype == torch.int32 and kv_slots.is_contiguous()
        assert torch.equal(kv_slots, kv_slots_of(table, page)[:, first:])
        assert behind.tolist() == [max(0, length - first) for length in lens.tolist()]


@pytest.mark.parametrize("split", [1, 2, 4])
def test_small_pages_are_the_same_cache(split: int) -> None:
    buffers, page = roomy(6, 9 * 64, 64), 64
    table, _ = batch(0, 6, 9, page)
    smaller = buffers.small_pages("a", table, split)
    assert torch.equal(kv_slots_of(smaller, page // split), kv_slots_of(table, page))


@pytest.mark.parametrize("positions", [700, 4097, 16384])
@pytest.mark.parametrize("page", [1, 16, 64, 128])
def test_every_size_and_pass_fits_the_planned_bytes(page: int, positions: int) -> None:
    """Batches run from the largest to the smallest, as in capturing, with two draft passes and the
    step itself. All share one buffer of the planned size, which never moves.
    """
    step = DecodingRows(33, positions, page, 3, 128, True)
    planned, buffers = table_bytes.fa3_mla_bytes(step), GraphBuffers()
    assert planned == 33 * -(-positions // page) * page * 4
    buffers.reserve(planned, CPU)
    places = set()
    for replay in range(2):
        for rows in (32, 16, 8, 3, 1):
            table, lens = batch(rows + replay, rows, step.columns, page)
            for number in (1, 2):
                kv_slots, _ = buffers.shifted((rows, number), table, lens, 1, page)
                places.add(kv_slots.data_ptr())
            split = table_bytes.mla_small_pages(page, 3 * 128)
            if split > 1:
                places.add(buffers.small_pages((rows, "forward"), table, split).data_ptr())
        buffers.reserve(planned, CPU)  # as for the real pool, after the small one
    assert buffers.nbytes == planned and len(places) == 1


def test_without_room_a_graph_keeps_its_own() -> None:
    """Captured kernels still read one address, another for each graph."""
    buffers = GraphBuffers()
    seen = [
        buffers.shifted(graph, *batch(seed, 4, 5, 16), 1, 16)[0].data_ptr()
        for seed, graph in enumerate(("a", "b", "a", "b"))
    ]
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert buffers.nbytes == 2 * 4 * 5 * 16 * 4


@pytest.mark.parametrize(
    ("drafts", "page", "width", "heads", "tables"),
    [
        (True, 64, 2, 128, 64),
        (False, 64, 1, 128, 2),
        (False, 64, 1, 16, 0),
        (False, 16, 1, 128, 0),
        (False, 128, 1, 128, 4),
    ],
)
def test_bytes_planned_for_latent_caches(
    drafts: bool, page: int, width: int, heads: int, tables: int
) -> None:
    """``tables`` counts page tables of the batch's own size."""
    step = DecodingRows(9, 1000, page, width, heads, drafts)
    assert table_bytes.fa3_mla_bytes(step) == tables * 9 * step.columns * 4
    assert table_bytes.shifted_bytes(step) == (9 * step.columns * page * 4 if drafts else 0)


@pytest.mark.parametrize(
    ("drafts", "page", "tables"),
    [(True, 64, 64), (False, 64, 0), (False, 256, 4), (True, 256, 256), (False, 16, 0)],
)
def test_bytes_planned_for_caches_of_heads(drafts: bool, page: int, tables: int) -> None:
    step = DecodingRows(9, 1000, page, 1, 32, drafts)
    assert table_bytes.fa3_mha_bytes(step) == tables * 9 * step.columns * 4
    assert table_bytes.hopper_mha_bytes(step) == (4 * 9 * step.columns * 4 if page == 256 else 0)
