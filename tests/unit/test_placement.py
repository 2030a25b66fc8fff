"""Small host arrays are copied to a device, and rows are looked up there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.core.step.to_device import FEW_ROWS_MAX, rows_at, send, send_pinned

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[1], [4, 4], [3, 0, 5, 1], [0], [17, 2, 33, 8, 1]])
def test_parts_arrive_and_begin_at_whole_words(lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    parts = [
        rng.integers(0, 1 << 30, length).astype(dtype)
        for length, dtype in zip(lengths, [np.int32, np.int64, np.int32, np.int64, np.int32])
    ]
    made: list[torch.Tensor] = []

    def memory(size: int) -> torch.Tensor:
        made.append(torch.full((size,), -1, dtype=torch.int32))
        return made[-1]

    found = send_pinned(parts, memory, CPU)
    assert [tensor.tolist() for tensor in found] == [part.tolist() for part in parts]
    copied = send(parts, CPU)
    assert [tensor.tolist() for tensor in copied] == [part.tolist() for part in parts]
    for tensor, other, part in zip(found, copied, parts, strict=True):
        assert (
            tensor.dtype is other.dtype is (torch.int64 if part.dtype == np.int64 else torch.int32)
        )
        assert tensor.storage_offset() * tensor.itemsize % 16 == 0
    assert len(made[0]) == sum(
        -(-length * part.itemsize // 16) * 4 for length, part in zip(lengths, parts)
    )


def test_a_part_is_a_copy_of_its_own() -> None:
    """The host may reuse its arrays while the device reads."""
    part = np.arange(5)
    (found,) = send([part], CPU)
    part += 1
    assert found.tolist() == [0, 1, 2, 3, 4]


def test_numbers_beyond_32_bits_arrive() -> None:
    part = np.array([1 << 40, -(1 << 35)])
    (found,) = send_pinned([part], lambda size: torch.zeros(size, dtype=torch.int32), CPU)
    assert found.tolist() == part.tolist()


@pytest.mark.parametrize("count", [0, 1, 2, FEW_ROWS_MAX, FEW_ROWS_MAX + 1])
def test_rows_of_a_table(count: int) -> None:
    table, at = torch.randn(50, 3, 4), torch.randint(0, 50, (count,))
    assert torch.equal(
        rows_at(table, at), torch.stack([table[i] for i in at]) if count else table[:0]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 8, FEW_ROWS_MAX, FEW_ROWS_MAX + 1])
def test_rows_replayed_from_a_graph(count: int) -> None:
    table, at = (
        torch.randn(4096, 2048, device="cuda").bfloat16(),
        torch.zeros(count, dtype=torch.int64, device="cuda"),
    )
    rows_at(table, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rows_at(table, at)
    for _ in range(3):
        at.random_(0, 4096)
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, table.index_select(0, at))
