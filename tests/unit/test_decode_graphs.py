"""Decode graphs: a filled graph holds what an eager step would have, then padding rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from glowplug.core.plugin.draft_shape import NO_DRAFTS
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch, StepShape
from glowplug.core.testing.harness.plans import bare_plan, sizes
from glowplug.plugins.graphs.capture.decode_graph import FIELD_ALIGNMENT, DecodeGraph, GraphShape
from glowplug.plugins.graphs.capture.staging import Staging
from glowplug.plugins.graphs.cuda_graph import CudaGraphOptions, default_sizes
from glowplug.plugins.graphs.cuda_graph_runtime import CudaGraph

CPU = torch.device("cpu")


def batch(rows: list[int], lens: list[int], width: int, page_size: int, seed: int) -> Batch:
    """Return a batch of decoding rows with pages of their own."""
    count, columns = len(rows), max([1, *(-(-length // page_size) for length in lens)])
    pages = np.zeros((count, columns), np.int32)
    numbers = np.random.default_rng(seed).permutation(np.arange(1, 1 + count * columns))
    for i, length in enumerate(lens):
        used = -(-length // page_size)
        pages[i, :used] = numbers[i * columns : i * columns + used]
    mode = Mode.DECODE if width == 1 else Mode.VERIFY
    return Batch(
        step=seed,
        mode=mode,
        rows=np.array(rows, np.int32),
        epochs=np.zeros(count, np.int64),
        num_decodes=count,
        query_lens=np.full(count, width, np.int32),
        kv_lens=np.array(lens, np.int32),
        samples=np.ones(count, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=pages,
    )


def graph(rows: int, width: int, page_size: int, groups: int = 0) -> DecodeGraph:
    shape = GraphShape.of(rows, sizes(width=width, page_size=page_size), groups=groups)
    return DecodeGraph(shape, CPU, Staging(shape.staged_bytes, CPU), None)


@pytest.mark.parametrize("width", [1, 3])
def test_the_padding_of_every_group_is_marked(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks lie where they lay at the capture, and are copied only when they change."""
    held = graph(4, width, 4, groups=3)
    step, drafts = held.batch.padding, held.batch.draft_padding
    assert step is not None and drafts is not None and step.own is not None
    copies: list[int] = []
    copy = Staging.copy
    monkeypatch.setattr(
        Staging,
        "copy",
        lambda self, at, source, target: (
            copies.append(len(source)),
            copy(self, at, source, target),
        ),
    )
    for own, counts in ((2, (3, 2, 0)), (2, (3, 2, 0)), (4, (4, 4, 4)), (0, (1, 0, 0))):
        made = batch(list(range(own)), [9] * own, width, 4, seed=1)
        made.agreed = StepShape(made.mode, max(counts), max(counts) * width, group_decodes=counts)
        held.fill(made)
        every = [row >= count for count in counts for row in range(4)]
        assert drafts.gathered[:, 0].tolist() == every
        assert step.gathered.view(12, width).tolist() == [[mark] * width for mark in every]
        assert step.own.view(4, width)[:, 0].tolist() == [row >= own for row in range(4)]
        assert drafts.own is not None
        assert drafts.own[:, 0].tolist() == [row >= own for row in range(4)]
    assert copies.count((1 + 3) * 4 * (width + 1)) == 3, "equal marks are not copied again"
    assert graph(4, width, 4).batch.padding is None


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([1, 2, 5]),
    page_size=st.sampled_from([1, 4, 16]),
    steps=st.lists(st.lists(st.integers(1, 59), max_size=6), min_size=1, max_size=5),
)
def test_a_slot_holds_the_batch_and_padding(
    width: int, page_size: int, steps: list[list[int]]
) -> None:
    held = graph(6, width, page_size)
    tensors = [
        held.batch.positions,
        held.batch.kv_slots,
        held.batch.row_ids,
        held.batch.kv_lens_device,
        held.batch.page_table,
        held.batch.query_starts,
    ]
    assert all(
        (tensor.data_ptr() - tensors[0].data_ptr()) % FIELD_ALIGNMENT == 0 for tensor in tensors[:4]
    )
    for seed, lens in enumerate(steps):
        lens = [length + width for length in lens]
        given_batch = batch(list(range(len(lens)))[::-1], lens, width, page_size, seed)
        made = held.fill(given_batch)
        live = len(lens)
        assert (
            made.num_rows == made.num_decodes == 6
            and made.num_tokens == 6 * width
            and made.step == seed
        )
        for i in range(6):
            length = lens[i] if i < live else held.shape.padded_length
            places = np.arange(length - width, length)
            pages = given_batch.pages[i] if i < live else np.zeros(64, np.int32)
            assert int(made.row_ids[i]) == made.rows[i] == (given_batch.rows[i] if i < live else 8)
            assert int(made.kv_lens_device[i]) == made.kv_lens[i] == length
            mine = slice(i * width, (i + 1) * width)
            assert made.positions[mine].tolist() == places.tolist()
            assert (
                made.kv_slots[mine].tolist()
                == (pages[places // page_size] * page_size + places % page_size).tolist()
            )
            read = -(-length // page_size) if i < live else held.shape.padded_columns
            assert (
                made.page_table[i, :read].tolist()
                == made.pages[i, :read].tolist()
                == pages[:read].tolist()
            )
        assert made.query_starts.tolist() == list(range(0, 6 * width + 1, width))
        now = [
            made.positions,
            made.kv_slots,
            made.row_ids,
            made.kv_lens_device,
            made.page_table,
            made.query_starts,
        ]
        assert [tensor.data_ptr() for tensor in now] == [tensor.data_ptr() for tensor in tensors]


def test_staging_is_taken_in_turns() -> None:
    staging, target = Staging(8, CPU), torch.zeros(8, dtype=torch.uint8)
    taken = []
    for value in range(40):
        taken.append(staging.take())
        staging.buffers[taken[-1]][:] = value
        staging.copy(taken[-1], staging.buffers[taken[-1]], target)
        assert target.tolist() == [value] * 8
    assert len(set(taken[:16])) == 16 and taken[:16] == taken[16:32]


@pytest.mark.parametrize(
    ("options", "rows", "want"),
    [
        ({}, 1, (1,)),
        ({}, 5, (1, 2, 3, 4, 5)),
        ({"max_batch": 2}, 100, (1, 2)),
        ({"batch_sizes": [8, 1, 4, 4]}, 6, (1, 4)),
        ({"batch_sizes": [8, 1, 4], "max_batch": 3}, 9, (1,)),
    ],
)
def test_slots_of_captured_sizes(
    options: dict[str, object], rows: int, want: tuple[int, ...]
) -> None:
    assert CudaGraphOptions.model_validate({"use": "cuda_graph", **options}).sizes(rows) == want


def test_default_sizes_waste_little() -> None:
    assert list(default_sizes()) == sorted(set(default_sizes()))
    for rows in (1, 7, 40, 256, 511, 2000):
        found = CudaGraphOptions().sizes(rows)
        assert found[-1] == min(rows, 512) and found[0] == 1
        assert all(
            above <= max(below * 3 // 2, below + 1) for below, above in zip(found, found[1:])
        )


def test_ranks_that_agreed_take_slots_of_one_shape() -> None:
    """The agreed number of rows decides, also for a rank with fewer rows or none. One rank with a
    prompt makes all ranks run eagerly.
    """
    runner = CudaGraph(CudaGraphOptions(batch_sizes=(1, 2, 4)), bare_plan(), Worker())
    runner._decode_graphs = {NO_DRAFTS: {rows: graph(rows, 1, 4) for rows in (1, 2, 4)}}
    runner._sizes = {NO_DRAFTS: [1, 2, 4]}
    assert runner.shapes(bare_plan()) == [
        (Mode.DECODE, 4, 1),
        (Mode.DECODE, 2, 1),
        (Mode.DECODE, 1, 1),
    ]
    assert runner.shapes(bare_plan(width=3))[0] == (Mode.VERIFY, 4, 3)
    for own in (0, 1, 3):
        held = batch(list(range(own)), [5] * own, 1, 4, 0)
        for agreed, rows in (
            (StepShape(Mode.DECODE, 3, 3), 4),
            (StepShape(Mode.DECODE, 5, 5), 0),
            (StepShape(Mode.PREFILL, 3, 20), 0),
            (StepShape(Mode.IDLE, 0, 0), 0),
        ):
            held.agreed = agreed
            found = runner.graph_for(held)
            assert (found.shape.rows if found else 0) == rows
    held.agreed = None
    found = runner.graph_for(held)
    assert found is not None and found.shape.rows == 4
