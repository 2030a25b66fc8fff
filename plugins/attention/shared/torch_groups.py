"""How a step's rows are grouped for attention in plain torch, and where each group's keys lie in
the paged cache.

Shapes come from the batch's host arrays; every index tensor is computed on the device from
``page_table``, ``kv_lens_device`` and ``query_starts``, so that nothing here waits for it. Built
once a step, read by every layer. Keys are counted from ``batch.first_key`` on: what lies before it
is never gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.batch import Batch


@dataclass(frozen=True)
class GroupLimits:
    """What one group may hold.

    Attributes:
        decode_keys: gathered keys (rows x length) of decoding rows; a single row may exceed it.
        keys: the same of prefill rows; a single row may exceed it unless ``split`` is set.
        queries: padded queries of prefill rows.
        own: a chunk that begins its sequence attends over its own tensors, without reading the
            cache.
        split: a longer row goes as a :class:`LongRow`, ``keys`` at a time.
    """

    decode_keys: int
    keys: int
    queries: int = 1 << 16
    own: bool = True
    split: bool = True


@dataclass(eq=False)
class Group:
    """Neighbouring rows that attend together: tokens ``first`` to ``first + tokens`` of the step.

    Attributes:
        rows, width, length: R rows of queries padded to W, keys padded to L.
        decode: rows are decoding rows (absorption pays).
        pad: int64 [R * W] the group's token for each padded query; None when nothing is padded.
        unpad: int64 [tokens] the padded query of each token; None likewise.
        slots: int64 [R * L] cache slots of the keys; None when the keys are the group's own tokens,
            causally. Beyond a row's end it repeats the row's first slot: no slot of another
            sequence is ever read.
        span: first cache slot of a single row whose keys lie side by side, read in place instead of
            by ``slots``.
        bias: [R, W, L], 0 where the query sees the key and -inf elsewhere; None for the group's own
            tokens.
    """

    first: int
    tokens: int
    rows: int
    width: int
    length: int
    decode: bool
    pad: Tensor | None = None
    unpad: Tensor | None = None
    slots: Tensor | None = None
    span: int | None = None
    bias: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """The group's tokens of x [T, ...]."""
        return x[self.first : self.first + self.tokens]

    def pack(self, x: Tensor) -> Tensor:
        """[tokens, ...] -> [R, W, ...]."""
        if self.pad is not None:
            x = x.index_select(0, self.pad)
        return x.view(self.rows, self.width, *x.shape[1:])

    def unpack(self, y: Tensor) -> Tensor:
        """[R, W, ...] -> [tokens, ...]."""
        y = y.reshape(self.rows * self.width, *y.shape[2:])
        return y if self.unpad is None else y.index_select(0, self.unpad)

    def gather(self, pool: Tensor) -> Tensor:
        """Keys from pool [slots, ...] -> [R, L, ...]."""
        if self.span is not None:
            return pool[self.span : self.span + self.length].unsqueeze(0)
        assert self.slots is not None
        return pool.index_select(0, self.slots).view(self.rows, self.length, *pool.shape[1:])


@dataclass(eq=False)
class LongRow:
    """One prefill row over a long cached prefix: its chunk causally, and the prefix piece by piece.

    ``pieces``: int64 slots of each piece.
    """

    first: int
    tokens: int
    pieces: list[Tensor]

    def take(self, x: Tensor) -> Tensor:
        return x[self.first : self.first + self.tokens]


@dataclass(eq=False)
class HostRow:
    """The one decoding row of a step whose cache lies in host memory as float32, for numpy.

    Attributes:
        slots: int64 [W] where the step's own tokens go; they are the row's last.
        page_size, first, end: the row's keys are at positions ``first`` to ``end`` of its pages.
        pages: the row's pages, a slice where they are neighbours in ascending order: read in place,
            then.
    """

    slots: NDArray[np.int64]
    page_size: int
    first: int
    end: int
    pages: NDArray[np.int32] | slice

    def exchange(self, pool: Tensor, value: Tensor) -> NDArray[np.float32]:
        """Write value [W, N] into pool [slots, N]; returns the row's keys [L, N]."""
        stored: NDArray[np.float32] = pool.numpy()
        stored[self.slots] = value.numpy()
        size = stored.shape[1]
        return stored.reshape(-1, self.page_size * size)[self.pages].reshape(-1, size)[
            self.first : self.end
        ]


def host_row(batch: Batch, page_size: int, queries: int, keys: int) -> HostRow | None:
    """The step as a :class:`HostRow`, if it is one decoding row of at most so many queries and keys
    on the CPU.
    """
    if (
        not batch.num_decodes == batch.num_rows == 1
        or batch.query_lens[0] > queries
        or not batch.page_table.is_cpu
    ):
        return None
    end = int(batch.kv_lens_device[0])
    if not batch.query_lens[0] <= end - batch.first_key <= keys:
        return None
    pages: NDArray[np.int32] = batch.page_table[0].numpy()[: -(-end // page_size)]
    neighbours = (pages[1:] - pages[:-1] == 1).all()
    return HostRow(
        batch.slots.numpy(),
        page_size,
        batch.first_key,
        end,
        slice(int(pages[0]), int(pages[-1]) + 1) if neighbours else pages,
    )


def store(pool: Tensor, slots: Tensor | None, value: Tensor) -> Tensor:
    """Write value [T, ...] into the cache; returns it as the cache will give it back, in its own
    dtype.
    """
    assert slots is not None, "plan_step comes first"
    stored = value.to(pool.dtype)
    pool.index_copy_(0, slots, stored)
    return stored.to(value.dtype)


def plan_groups(
    batch: Batch,
    page_size: int,
    limits: GroupLimits,
    decode_bias: torch.dtype,
    prefill_bias: torch.dtype,
) -> list[Group | LongRow]:
    """Groups of the step in token order. ``*_bias``: dtype of the biases of decoding and prefill
    rows.
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
    """(first row, last row + 1); looks at rows one by one only when all together are too many."""
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
    """(first row, last row + 1, kind) with kind "own", "cached" or "long"."""
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
    """Fill ``pad`` and ``unpad`` unless every row has the same number of queries."""
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


def _slots(batch: Batch, page_size: int, low: int, high: int, length: int) -> Tensor:
    """int64 [high - low, length] cache slots of ``length`` positions from the first key on."""
    first = batch.first_key
    pages: Tensor = batch.page_table[low:high, : -(-(first + length) // page_size)].long()
    offsets = torch.arange(page_size, device=pages.device)
    slots = (pages.unsqueeze(-1) * page_size + offsets).view(high - low, -1)
    return slots[:, first : first + length]


def _span(batch: Batch, page_size: int, low: int, high: int) -> int | None:
    """First slot of a single row of one query whose pages are neighbours in ascending order; None
    for all others.

    On the CPU only, where the device's own lengths and pages can be read without waiting.
    """
    if high - low > 1 or batch.query_lens[low] != 1 or not batch.page_table.is_cpu:
        return None
    pages = batch.page_table[low].numpy()[: -(-int(batch.kv_lens_device[low]) // page_size)]
    if not len(pages) or (pages[1:] - pages[:-1] != 1).any():
        return None
    return int(pages[0]) * page_size + batch.first_key


def _with_keys(
    group: Group, batch: Batch, page_size: int, low: int, high: int, dtype: torch.dtype
) -> Group:
    """Fill ``slots`` or ``span``, and ``bias``."""
    group.span = _span(batch, page_size, low, high)
    if group.span is not None:
        group.length = int(batch.kv_lens_device[low]) - batch.first_key
        group.bias = torch.zeros(1, 1, group.length, dtype=dtype, device=batch.page_table.device)
        return group
    slots = _slots(batch, page_size, low, high, group.length)
    lens = batch.kv_lens_device[low:high].long().unsqueeze(-1) - batch.first_key
    keys = torch.arange(group.length, device=slots.device)
    # NOTE: masking alone would not keep a NaN out of the sum; keys past the end are replaced by the
    # row's first.
    group.slots = torch.where(keys < lens, slots, slots[:, :1]).view(-1)
    counts = (
        (batch.query_starts[low + 1 : high + 1] - batch.query_starts[low:high]).long().unsqueeze(-1)
    )
    positions = (lens - counts + torch.arange(group.width, device=slots.device)).clamp_(min=0)
    seen = keys <= positions.unsqueeze(-1)
    group.bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )
    return group


def _long_row(batch: Batch, page_size: int, keys: int, row: int, starts: np.ndarray) -> LongRow:
    tokens = int(batch.query_lens[row])
    prefix = int(batch.kv_lens[row]) - batch.first_key - tokens
    slots = _slots(batch, page_size, row, row + 1, prefix).reshape(-1)
    return LongRow(int(starts[row]), tokens, list(slots.split(keys)))
