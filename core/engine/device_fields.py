"""The device fields of a batch: tokens flattened row by row, sent to the device in one copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.batch import Batch, Padding, StepShape
from glowplug.core.step.sampled_last_layer import HostEnds


class FlatTokens(NamedTuple):
    """The T tokens of a step, row by row.

    Attributes:
        starts: int32 [B + 1], index of each row's first token; the last entry is T.
        rows: int32 [T], index of each token's row in the batch.
        positions: int32 [T], position of each token in its sequence.
        kv_slots: int32 [T], KV slot of each token.
    """

    starts: NDArray[np.int32]
    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int32]


def flatten(batch: Batch, kv_lens: NDArray[np.int32], page_size: int) -> FlatTokens:
    """Return the tokens of ``batch``, row by row.

    Args:
        batch: the batch.
        kv_lens: int32 [B], number of cached tokens of each row after the step.
        page_size: tokens per page.
    """
    count = batch.num_rows
    queries = batch.query_lens
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(queries, out=starts[1:])
    if batch.num_tokens == count:  # one token per row needs no flattening
        rows = np.arange(count, dtype=np.int32)
        positions = kv_lens - 1
    else:
        rows = np.repeat(np.arange(count, dtype=np.int32), queries)
        positions = np.arange(len(rows), dtype=np.int32) - starts[rows]
        positions += (kv_lens - queries)[rows]
    kv_slots = batch.pages[rows, positions // page_size] * page_size + positions % page_size
    return FlatTokens(starts, rows, positions, kv_slots)


def logits_index(batch: Batch, starts: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """Return the indices of the tokens whose logits are needed, int64 [N]; None: all are needed.

    ``starts``: ``FlatTokens.starts``.
    """
    if batch.num_decodes == batch.num_rows:
        return None
    sampling = np.nonzero(batch.samples[batch.num_decodes :])[0] + batch.num_decodes
    return np.concatenate(
        [np.arange(batch.decode_tokens), starts[sampling + 1].astype(np.int64) - 1]
    )


def group_counts(batch: Batch) -> NDArray[np.int64] | None:
    """Return the tokens of each group, then the decoding rows of each, int64 [2 * groups].

    None if no group has fewer than the others, so that no tokens are padding.
    """
    shape = batch.agreed
    if shape is None or len(set(shape.group_tokens)) < 2 and len(set(shape.group_decodes)) < 2:
        return None
    return np.array(shape.group_tokens + shape.group_decodes, np.int64)


def set_padding(batch: Batch, shape: StepShape, counts: Tensor) -> None:
    """Set the padding of ``batch`` and of the draft's passes before it.

    Args:
        batch: the batch.
        shape: the shape on which the groups have agreed.
        counts: a copy of ``group_counts`` on the device.
    """
    tokens, decodes = counts.view(2, -1)
    batch.padding = Padding(None, _behind(tokens, shape.tokens))
    if shape.decodes:
        batch.draft_padding = Padding(None, _behind(decodes, shape.decodes))


def _behind(counts: Tensor, most: int) -> Tensor:
    """Return which of ``most`` places of each group are not among its first ones.

    ``counts``: number of these first places, int64 [groups]. The result is bool [groups * most, 1].
    """
    places = torch.arange(most, device=counts.device)
    return (places >= counts[:, None]).view(-1, 1)


def host_arrays(
    batch: Batch,
    kv_lens: NDArray[np.int32],
    flat: FlatTokens,
    wanted: NDArray[np.int64] | None,
    ends: HostEnds | None,
) -> list[NDArray[Any]]:
    """Return the numpy arrays that are copied to the device fields of ``batch``.

    ``set_device_fields`` takes the copies on the device.

    Args:
        batch: the batch.
        kv_lens: int32 [B], number of cached tokens of each row after the step.
        flat: the tokens of the step, from ``flatten``.
        wanted: tokens whose logits are needed, from ``logits_index``; None: all.
        ends: the sampled tokens, if only these run through the last layer; None: all tokens do.
    """
    arrays: list[NDArray[Any]] = [
        flat.positions.astype(np.int64),
        flat.kv_slots.astype(np.int64),
        batch.rows.astype(np.int64),
        kv_lens.astype(np.int32),
        flat.starts,
        batch.prompt_ids.astype(np.int64),
        batch.pages.ravel(),
    ]
    if wanted is not None:
        arrays.append(wanted)
    if ends is not None:
        arrays += ends.parts()
    counts = group_counts(batch)
    if counts is not None:
        assert ends is None, "ranks that exchange tokens run the last layer for all of them"
        arrays.append(counts)
    return arrays


def set_device_fields(
    batch: Batch, views: tuple[Tensor, ...], indexed: bool, ends: HostEnds | None
) -> None:
    """Set the device fields of ``batch``.

    Args:
        batch: the batch.
        views: copies of ``host_arrays`` on the device.
        indexed: True: the logits of some tokens only are needed.
        ends: the sampled tokens, if only these run through the last layer; None: all tokens do.
    """
    batch.positions = views[0]
    batch.kv_slots = views[1]
    batch.row_ids = views[2]
    batch.kv_lens_device = views[3]
    batch.query_starts = views[4]
    batch.input_ids = views[5]
    batch.page_table = views[6].view(batch.pages.shape)
    batch.logits_index = views[7] if indexed else None
    batch.ends = None if ends is None else ends.on_device(batch.step, views[8:])
    if len(views) > 7 + indexed and ends is None:
        assert batch.agreed is not None
        set_padding(batch, batch.agreed, views[-1])
