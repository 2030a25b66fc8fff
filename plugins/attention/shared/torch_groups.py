"""Groups of a step's rows for attention in plain torch, and the KV slots of each group's keys.

Shapes come from the batch's host arrays. Every index tensor is computed on the device from
``page_table``, ``kv_lens_device`` and ``query_starts``, so the host never waits for the device. The
groups are built once per step and read by every layer. Keys are counted from ``batch.first_key``
on; entries before it are never gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plugin.draft_shape import MASK_BITS
from glowplug.core.step.batch import Batch


@dataclass(frozen=True)
class GroupLimits:
    """Limits on the size of one group of rows, and two choices for prefill rows.

    Attributes:
        decode_keys: Largest number of gathered keys (rows x length) of decode rows; a single row
            may exceed it.
        keys: Largest number of gathered keys of prefill rows; a single row may exceed it unless
            ``split`` is set.
        queries: Largest number of padded queries of prefill rows.
        own: Whether a chunk that begins its sequence attends over its own tensors, without reading
            the cache.
        split: Whether a row with more than ``keys`` keys becomes a :class:`LongRow`, which reads
            ``keys`` keys at a time.
    """

    decode_keys: int
    keys: int
    queries: int = 1 << 16
    own: bool = True
    split: bool = True


@dataclass(eq=False)
class Group:
    """Neighbouring rows of a step whose attention is computed together, padded to equal lengths.

    Attributes:
        first: Index of the group's first token in the step.
        tokens: Number of tokens of the group.
        rows: R, the number of rows of the group.
        width: W, the number of queries per row, padding included.
        length: L, the number of keys per row, padding included.
        decode: Whether the rows are decode rows, for which absorption pays.
        pad: int64 [R * W], the group's token for each padded query; None without padding.
        unpad: int64 [tokens], the padded query of each token; None without padding.
        kv_slots: int64 [R * L], KV slots of the keys; None if the keys are the group's own tokens,
            causally. Beyond a row's end the row's first KV slot is repeated: no slot of another
            sequence is ever read.
        span: First KV slot of a single row whose keys are contiguous, read in place instead of
            through ``kv_slots``.
        bias: [R, W, L], 0 where the query sees the key and -inf elsewhere; None if the keys are the
            group's own tokens.
    """

    first: int
    tokens: int
    rows: int
    width: int
    length: int
    decode: bool
    pad: Tensor | None = None
    unpad: Tensor | None = None
    kv_slots: Tensor | None = None
    span: int | None = None
    bias: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Return the part of x [T, ...] for the group's tokens; T: number of the step's tokens."""
        return x[self.first : self.first + self.tokens]

    def pack(self, x: Tensor) -> Tensor:
        """Return x [tokens, ...], a tensor of the group's tokens, padded to [R, W, ...]."""
        if self.pad is not None:
            x = x.index_select(0, self.pad)
        return x.view(self.rows, self.width, *x.shape[1:])

    def unpack(self, y: Tensor) -> Tensor:
        """Return y [R, W, ...] without its padding, as [tokens, ...]."""
        y = y.reshape(self.rows * self.width, *y.shape[2:])
        return y if self.unpad is None else y.index_select(0, self.unpad)

    def gather(self, pool: Tensor) -> Tensor:
        """Return the cache entries of the group's keys, [R, L, ...], from pool [kv_slots, ...]."""
        if self.span is not None:
            return pool[self.span : self.span + self.length].unsqueeze(0)
        assert self.kv_slots is not None
        return pool.index_select(0, self.kv_slots).view(self.rows, self.length, *pool.shape[1:])


@dataclass(eq=False)
class LongRow:
    """One prefill row over a long cached prefix.

    The row's tokens of this step attend to one another causally, and to the prefix piece by piece.

    Attributes:
        first: Index of the row's first token in the step.
        tokens: Number of tokens of the row in the step.
        pieces: int64 KV slots of each piece of the prefix.
    """

    first: int
    tokens: int
    pieces: list[Tensor]

    def take(self, x: Tensor) -> Tensor:
        return x[self.first : self.first + self.tokens]


def store(pool: Tensor, kv_slots: Tensor | None, value: Tensor) -> Tensor:
    """Write value [T, ...] into ``pool``, a tensor of the cache, at the step's ``kv_slots`` [T].

    Returns:
        The values rounded to the cache's dtype, as a later read of the cache has them, in the dtype
        of ``value``.
    """
    assert kv_slots is not None, "plan_step must be called first"
    stored = value.to(pool.dtype)
    pool.index_copy_(0, kv_slots, stored)
    return stored.to(value.dtype)


def plan_groups(
    batch: Batch,
    page_size: int,
    limits: GroupLimits,
    decode_bias: torch.dtype,
    prefill_bias: torch.dtype,
) -> list[Group | LongRow]:
    """Return the step's rows divided into groups, in token order.

    Args:
        batch: The step.
        page_size: Tokens per page.
        limits: Limits of one group.
        decode_bias: Dtype of ``Group.bias`` of decode rows.
        prefill_bias: Dtype of ``Group.bias`` of prefill rows.
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(batch.query_lens, dtype=np.int64)])
    groups: list[Group | LongRow] = []
    for low, high in _decode_runs(batch, limits):
        group = _frame(batch, starts, low, high, decode=True)
        groups.append(_with_keys(group, batch, page_size, low, high, decode_bias))
    for low, high, kind in _prefill_runs(batch, limits):
        if kind == "long":
            groups.append(_long_row(batch, page_size, limits.keys, low, starts))
            continue
        group = _frame(batch, starts, low, high, decode=False)
        _pad(group, batch, low, high)
        groups.append(
            _with_keys(group, batch, page_size, low, high, prefill_bias)
            if kind == "cached"
            else group
        )
    return groups


def _decode_runs(batch: Batch, limits: GroupLimits) -> Iterator[tuple[int, int]]:
    """Yield (first row, last row + 1) of each group of decode rows.

    Rows are examined one by one only if all decode rows together exceed the limit.
    """
    lens = batch.kv_lens[: batch.num_decodes] - batch.first_key
    low = 0
    longest = 0
    for row in range(len(lens) if len(lens) * int(lens.max(initial=0)) > limits.decode_keys else 0):
        longest = max(longest, int(lens[row]))
        if row > low and longest * (row + 1 - low) > limits.decode_keys:
            yield low, row
            low = row
            longest = int(lens[row])
    if low < len(lens):
        yield low, len(lens)


def _prefill_runs(batch: Batch, limits: GroupLimits) -> Iterator[tuple[int, int, str]]:
    """Yield (first row, last row + 1, kind) of each group of prefill rows.

    The kind is "own" if the rows attend over their own tokens, "cached" if they read all keys from
    the cache, and "long" for a single row with more than ``limits.keys`` keys.
    """
    low = batch.num_decodes
    kind = ""
    width = 0
    length = 0
    tokens = 0
    for row in range(batch.num_decodes, batch.num_rows):
        queries = int(batch.query_lens[row])
        keys = int(batch.kv_lens[row]) - batch.first_key
        row_kind = _kind(queries, keys, limits)
        count = row + 1 - low
        wide = max(width, queries)
        long = max(length, keys)
        fits = (
            row_kind == kind != "long"
            and count * wide <= min(limits.queries, 2 * (tokens + queries) + 256)
            and (kind == "own" or count * long <= limits.keys)
        )
        if row > low and not fits:
            yield low, row, kind
            low = row
            tokens = 0
            wide = queries
            long = keys
        kind = row_kind
        width = wide
        length = long
        tokens = tokens + queries
    if low < batch.num_rows:
        yield low, batch.num_rows, kind


def _kind(queries: int, keys: int, limits: GroupLimits) -> str:
    if limits.own and queries == keys:
        return "own"
    return "long" if limits.split and keys > limits.keys else "cached"


def _frame(batch: Batch, starts: np.ndarray, low: int, high: int, decode: bool) -> Group:
    longest = int(batch.kv_lens[low:high].max())
    return Group(
        first=int(starts[low]),
        tokens=int(starts[high] - starts[low]),
        rows=high - low,
        width=int(batch.query_lens[low:high].max()),
        length=longest - batch.first_key,
        decode=decode,
    )


def _pad(group: Group, batch: Batch, low: int, high: int) -> None:
    """Set ``pad`` and ``unpad`` of a group unless all its rows have the same number of queries.

    The group has rows ``low`` to ``high - 1`` of the batch.
    """
    if group.tokens == group.rows * group.width:
        return
    begins = batch.query_starts[low : high + 1].long() - group.first
    counts = begins[1:] - begins[:-1]
    columns = torch.arange(group.width, device=begins.device)
    group.pad = (begins[:-1, None] + torch.minimum(columns, counts[:, None] - 1)).view(-1)
    rows = torch.arange(group.rows, device=begins.device)
    row_of = torch.repeat_interleave(rows, counts, output_size=group.tokens)
    group.unpad = (
        torch.arange(group.tokens, device=begins.device) - begins[row_of] + row_of * group.width
    )


def _kv_slots(batch: Batch, page_size: int, low: int, high: int, length: int) -> Tensor:
    """Return the KV slots of the first ``length`` keys of rows ``low`` to ``high - 1``.

    Returns:
        int64 [high - low, length].
    """
    first = batch.first_key
    pages: Tensor = batch.page_table[low:high, : -(-(first + length) // page_size)].long()
    offsets = torch.arange(page_size, device=pages.device)
    kv_slots = (pages.unsqueeze(-1) * page_size + offsets).view(high - low, -1)
    return kv_slots[:, first : first + length]


def _span(batch: Batch, page_size: int, low: int, high: int) -> int | None:
    """Return the first KV slot of row ``low`` if its keys can be read in place, else None.

    They can if rows ``low`` to ``high - 1`` are one row, which has one query that sees all keys,
    and pages that are contiguous and ascending. On a GPU the result is always None, because the
    host would have to wait for the GPU to read the batch's lengths and pages.
    """
    if high - low > 1 or batch.query_lens[low] != 1 or not batch.page_table.is_cpu:
        return None
    if low < batch.num_decodes and batch.tree_mask is not None:
        return None
    pages = batch.page_table[low].numpy()[: -(-int(batch.kv_lens_device[low]) // page_size)]
    if not len(pages) or (pages[1:] - pages[:-1] != 1).any():
        return None
    return int(pages[0]) * page_size + batch.first_key


def _with_keys(
    group: Group, batch: Batch, page_size: int, low: int, high: int, dtype: torch.dtype
) -> Group:
    """Set the keys of a group with rows ``low`` to ``high - 1``, and return the group.

    This sets the attributes ``kv_slots`` or ``span``, and ``bias`` of dtype ``dtype``.
    """
    group.span = _span(batch, page_size, low, high)
    if group.span is not None:
        group.length = int(batch.kv_lens_device[low]) - batch.first_key
        group.bias = torch.zeros(1, 1, group.length, dtype=dtype, device=batch.page_table.device)
        return group
    kv_slots = _kv_slots(batch, page_size, low, high, group.length)
    lens = batch.kv_lens_device[low:high].long().unsqueeze(-1) - batch.first_key
    keys = torch.arange(group.length, device=kv_slots.device)
    # NOTE: masking alone would not keep a NaN out of the sum, so keys beyond the row's end are
    # replaced by the row's first key.
    group.kv_slots = torch.where(keys < lens, kv_slots, kv_slots[:, :1]).view(-1)
    seen = _seen_in_tree if group.decode and batch.tree_mask is not None else _seen_in_chain
    bias = torch.zeros(group.rows, group.width, group.length, dtype=dtype, device=keys.device)
    group.bias = bias.masked_fill_(~seen(batch, low, high, keys, lens), float("-inf"))
    return group


def _seen_in_chain(batch: Batch, low: int, high: int, keys: Tensor, lens: Tensor) -> Tensor:
    """Return whether the queries of rows ``low`` to ``high - 1`` see keys, bool [R, W, L].

    Args:
        batch: The step.
        low: Index of the first row.
        high: Index after the last row.
        keys: Numbers of the keys, int64 [L].
        lens: Numbers of keys of the rows, int64 [R, 1].
    """
    counts = batch.query_starts[low + 1 : high + 1] - batch.query_starts[low:high]
    queries = torch.arange(int(batch.query_lens[low:high].max()), device=keys.device)
    positions: Tensor = (lens - counts.unsqueeze(-1) + queries).clamp_(min=0)
    return keys <= positions.unsqueeze(-1)


def _seen_in_tree(batch: Batch, low: int, high: int, keys: Tensor, lens: Tensor) -> Tensor:
    """Return what :func:`_seen_in_chain` does, for rows of trees.

    A query that sees no key, as in a row without keys, sees the first one: softmax needs a key.
    """
    mask: Tensor = batch.tree_mask[low:high]
    named = (keys - (lens - (batch.tree_span or mask.shape[1]))).unsqueeze(1)
    seen = ((mask.unsqueeze(-1) >> named.clamp(0, MASK_BITS - 1)) & 1).bool() | (named < 0)
    seen &= (keys < lens).unsqueeze(1)
    seen[..., 0] |= ~seen.any(dim=-1)
    return seen


def _long_row(batch: Batch, page_size: int, keys: int, row: int, starts: np.ndarray) -> LongRow:
    tokens = int(batch.query_lens[row])
    prefix = int(batch.kv_lens[row]) - batch.first_key - tokens
    kv_slots = _kv_slots(batch, page_size, row, row + 1, prefix).reshape(-1)
    return LongRow(int(starts[row]), tokens, list(kv_slots.split(keys)))
