"""Cache entries moved by Triton against the reference: in the interpreter, or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.paged import move_entries as kernel
from glowplug.kernels.paged.move_entries_reference import move_entries as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LAYERS = 60, 3
#: shapes and dtypes of a layer's entries; their words have 8, 4, 2 and 1 bytes
ENTRIES = {
    "latent in bf16": [((576,), torch.bfloat16)],
    "keys and values in float16": [((2, 20), torch.float16)] * 2,
    "latent and rotary part in float32": [((16,), torch.float32), ((5,), torch.float32)],
    "latent in FP8": [((18,), torch.float8_e4m3fn)],
    "records of 656 bytes": [((656,), torch.uint8)],
    "codes and a scale": [((7,), torch.float8_e5m2), ((1,), torch.float32)],
}


def random_moves(rows: int, moves: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sources and targets int64 [rows, moves].

    The first row's entries stay. Entries of the second row move from slots that later moves of
    the row overwrite. The other rows' moves are random.
    """
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SLOTS)[: rows * moves].reshape(rows, moves)
    sources = slots.copy()
    count = 2 * moves // 3
    sources[1, :count] = slots[1, moves - count :]
    for row in range(2, rows):
        path = np.sort(rng.permutation(moves)[: rng.integers(1, moves + 1)])
        sources[row, : len(path)] = slots[row, path]
    return torch.from_numpy(sources), torch.from_numpy(slots)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("moves", [1, 5, 8, 19])
def test_moved_entries_equal_the_reference(name: str, moves: int) -> None:
    """Only entries of the named layers are written, and no source is overwritten before its
    entry is read.
    """
    generator = torch.Generator().manual_seed(moves)
    pools = [
        [
            torch.randint(
                0, 256, (SLOTS, *shape[:-1], shape[-1] * dtype.itemsize), generator=generator
            )
            .to(torch.uint8)
            .view(dtype)
            for shape, dtype in ENTRIES[name]
        ]
        for _ in range(LAYERS)
    ]
    got = [[pool.to(DEVICE, copy=True) for pool in layer] for layer in pools]
    sources, targets = random_moves(3, moves, moves)
    table = kernel.EntryTable([dict(enumerate(layer)) for layer in got])  # type: ignore[misc]
    assert table.word <= 8
    kernel.move_entries(table, sources.to(DEVICE), targets.to(DEVICE), range(1, LAYERS))
    for index, layer in enumerate(pools):
        if index:
            reference(layer, sources, targets)
        for pool, found in zip(layer, got[index], strict=True):
            assert torch.equal(found.cpu().view(torch.uint8), pool.view(torch.uint8)), index


def test_no_rows_or_layers_are_moved() -> None:
    pool = torch.arange(12.0, device=DEVICE).view(4, 3)
    table = kernel.EntryTable([{"kv": pool}])
    none = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    kernel.move_entries(table, none, none, range(1))
    slots = torch.tensor([[2, 3]], device=DEVICE)
    kernel.move_entries(table, slots, slots - 1, range(1, 1))
    assert torch.equal(pool.cpu(), torch.arange(12.0).view(4, 3))


@pytest.mark.gpu
def test_a_graph_replays_other_moves() -> None:
    """The captured launch reads the slots that its tensors hold at replay."""
    pool = torch.randn(SLOTS, 576, device="cuda").bfloat16()
    table = kernel.EntryTable([{"kv": pool}])
    sources, targets = (slots.cuda() for slots in random_moves(3, 6, 0))
    kernel.move_entries(table, targets, targets, range(1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.move_entries(table, sources, targets, range(1))
    for seed in range(3):
        expected = pool.cpu()
        moves = random_moves(3, 6, seed)
        reference([expected], *moves)
        sources.copy_(moves[0])
        targets.copy_(moves[1])
        graph.replay()
        assert torch.equal(pool.cpu(), expected)
