"""Places of the decoding rows' tokens, whose exact lengths are known on the device only."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.step.batch import Batch
from glowplug.core.step.to_device import kv_slots_at


def place_tokens(batch: Batch, lengths: Tensor, page_size: int) -> None:
    """Replace the upper bounds of decoding rows by exact positions, KV slots and lengths.

    Siblings of a tree have the same position, but each has a KV slot of its own.

    Args:
        batch: The step; ``batch.tree`` has the trees of its decoding rows.
        lengths: Number of cached tokens of each of these rows, int32 [D].
        page_size: Tokens per page.
    """
    rows = batch.num_decodes
    if not rows:
        return
    tokens = batch.decode_tokens
    width = tokens // rows
    starts = lengths.long()[:, None]
    places = starts + torch.arange(width, device=lengths.device)
    positions = places if batch.tree is None else starts + batch.tree.depths
    batch.positions[:tokens] = positions.view(-1)
    batch.kv_slots[:tokens] = kv_slots_at(batch.page_table[:rows], places, page_size).view(-1)
    batch.kv_lens_device[:rows] = lengths + width
