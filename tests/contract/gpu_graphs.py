"""The padded batch of a captured graph in fixed memory, for attention tests on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from glowplug.core.step.batch import Batch
from glowplug.core.testing.harness.paged_world import Row, make_world


def padded(width: int, first_key: int, page_size: int, device: str, cached: torch.dtype) -> Batch:
    """A graph's batch of six rows, all of them padding so far."""
    world = make_world([Row(width + first_key, width) for _ in range(6)], page_size, 0)
    world.move(device, cached)
    batch = world.batch
    batch.first_key = first_key
    batch.pages = np.zeros((6, 24), np.int32)
    batch.page_table = torch.zeros(6, 24, dtype=torch.int32, device=device)
    batch.kv_slots.zero_()
    return batch


def plant(static: Batch, seed: int) -> None:
    """Write random trees to a graph's batch, whose masks name two keys beside the step's tokens."""
    rows, width = static.num_rows, int(static.query_lens[0])
    rng = np.random.default_rng(seed)
    masks = rng.integers(0, 1 << width + 2, (rows, width)) | 4 << np.arange(width)
    if static.tree_mask is None:
        static.tree_mask = static.kv_slots.new_zeros(rows, width)
    static.tree_mask.copy_(torch.from_numpy(masks))
    static.tree_span = width + 2


def refill(static: Batch, batch: Batch, offset: int, page_size: int) -> None:
    """Copy the rows of ``batch`` to the front, their pages ``offset`` further on; the last rows
    stay padding.
    """
    rows, tokens, columns = batch.num_rows, batch.num_tokens, batch.page_table.shape[1]
    moved = batch.page_table + offset * (batch.page_table > 0)
    static.page_table[:rows, :columns] = moved[:, : static.page_table.shape[1]]
    static.pages[:] = static.page_table.cpu().numpy()
    static.kv_lens_device[:rows] = batch.kv_lens_device
    static.kv_lens[:rows] = batch.kv_lens
    static.kv_slots[:tokens] = batch.kv_slots + offset * page_size
