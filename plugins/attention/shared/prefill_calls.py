"""The split of prefill rows into calls of ragged attention over expanded keys.

Calls are planned on the host, and all their indices are sent to the device in one copy. Keys are
counted from ``batch.first_key`` on; entries before it are never read. R is the number of rows of a
call, and K the number of keys of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.batch import Batch
from glowplug.core.step.to_device import send

Ints = NDArray[np.int32]


@dataclass(eq=False)
class RaggedCall:
    """One call of ragged attention: R rows of queries, each with its own keys.

    Attributes:
        q_starts: int32 [R + 1] on the device, prefix sums of the rows' numbers of queries.
        k_starts: int32 [R + 1] on the device, prefix sums of the rows' numbers of keys.
        max_q: Largest number of queries of a row.
        max_k: Largest number of keys of a row.
        causal: True if a row's last query sees all keys of the row and each query before it one key
            less; False if every query sees all keys.
        kv_slots: int32 [K] KV slots of the keys; None if the keys are the rows' own tokens.
        q_lens: Number of queries of each row, on the host.
        k_lens: Number of keys of each row, on the host.
    """

    q_starts: Tensor
    k_starts: Tensor
    max_q: int
    max_k: int
    causal: bool
    kv_slots: Tensor | None
    q_lens: Ints
    k_lens: Ints


@dataclass(eq=False)
class RaggedRows:
    """Neighbouring prefill rows and their calls of ragged attention.

    The rows have ``tokens`` tokens of the step, from index ``first`` on. If there are several
    calls, each covers a part of the rows' keys, and their results are merged.
    """

    first: int
    tokens: int
    calls: list[RaggedCall]


@dataclass(frozen=True)
class _Keys:
    """A planned call of ragged attention whose indices are not on the device yet.

    ``kv_slots`` is None if the keys are the rows' own tokens.
    """

    q_lens: Ints
    k_lens: Ints
    causal: bool
    kv_slots: Ints | None


def plan_ragged(batch: Batch, page_size: int, most_keys: int) -> list[RaggedRows]:
    """Return the prefill rows of ``batch`` in token order, in groups with their attention calls.

    A call reads at most ``most_keys`` keys from the cache. Rows without a cached prefix attend over
    the keys of their own tokens and do not read the cache. Other rows read all their keys from the
    cache in one call that several rows may share. A row that has too many keys for one call is
    a group of its own: one causal call for its own tokens, and several for its prefix.
    """
    starts = np.zeros(batch.num_rows + 1, np.int64)
    np.cumsum(batch.query_lens, out=starts[1:])
    runs = list(_runs(batch, most_keys))
    parts = []
    for low, high, kind in runs:
        parts.append(
            _long(batch, page_size, most_keys, low)
            if kind == "long"
            else [_own(batch, low, high) if kind == "own" else _cached(batch, page_size, low, high)]
        )
    device = batch.page_table.device
    arrays = [array for keys in parts for key in keys for array in _arrays(key)]
    views = iter(send(arrays, device)) if arrays else iter(())
    return [
        RaggedRows(
            int(starts[low]), int(starts[high] - starts[low]), [_call(key, views) for key in keys]
        )
        for (low, high, _), keys in zip(runs, parts, strict=True)
    ]


def _runs(batch: Batch, most_keys: int) -> Iterator[tuple[int, int, str]]:
    """Yield (first row, last row + 1, kind) for each group of prefill rows.

    The kind is "own" if the rows attend over their own tokens, "cached" if they read all keys from
    the cache, and "long" for a single row with more than ``most_keys`` keys.
    """
    low = batch.num_decodes
    kind = ""
    held = 0
    for row in range(batch.num_decodes, batch.num_rows):
        keys = int(batch.kv_lens[row]) - batch.first_key
        row_kind = (
            "own"
            if int(batch.query_lens[row]) == keys
            else "long"
            if keys > most_keys
            else "cached"
        )
        joins = row_kind == kind == "own" or (
            kind == "cached" and row_kind != "long" and held + keys <= most_keys
        )
        if row > low and not joins:
            yield low, row, kind
            low = row
            held = 0
            kind = row_kind
        kind = kind or row_kind
        held = held + keys
    if low < batch.num_rows:
        yield low, batch.num_rows, kind


def _own(batch: Batch, low: int, high: int) -> _Keys:
    queries = batch.query_lens[low:high]
    return _Keys(queries, queries, True, None)


def _cached(batch: Batch, page_size: int, low: int, high: int) -> _Keys:
    first = batch.first_key
    ends = batch.kv_lens[low:high]
    kv_slots = [
        _kv_slots(batch, page_size, row, first, int(batch.kv_lens[row])) for row in range(low, high)
    ]
    return _Keys(batch.query_lens[low:high], ends - np.int32(first), True, np.concatenate(kv_slots))


def _long(batch: Batch, page_size: int, most_keys: int, row: int) -> list[_Keys]:
    queries = batch.query_lens[row : row + 1]
    begin = batch.first_key
    end = int(batch.kv_lens[row] - queries[0])
    pieces = -(-(end - begin) // most_keys)
    bounds = np.linspace(begin, end, pieces + 1).astype(int)
    return [_own(batch, row, row + 1)] + [
        _Keys(
            queries,
            np.array([high - low], np.int32),
            False,
            _kv_slots(batch, page_size, row, int(low), int(high)),
        )
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _kv_slots(batch: Batch, page_size: int, row: int, begin: int, end: int) -> Ints:
    """Return the KV slots of positions ``begin`` to ``end - 1`` of row ``row``."""
    first = begin // page_size
    pages = batch.pages[row, first : -(-end // page_size)]
    within: Ints = np.arange(page_size, dtype=np.int32)
    starts: Ints = pages[:, None] * np.int32(page_size)
    kv_slots = (starts + within).ravel()
    return kv_slots[begin - first * page_size :][: end - begin]


def _arrays(keys: _Keys) -> list[Ints]:
    return [_sums(keys.q_lens), _sums(keys.k_lens)] + (
        [] if keys.kv_slots is None else [keys.kv_slots]
    )


def _call(keys: _Keys, views: Iterator[Tensor]) -> RaggedCall:
    return RaggedCall(
        next(views),
        next(views),
        int(keys.q_lens.max()),
        int(keys.k_lens.max()),
        keys.causal,
        None if keys.kv_slots is None else next(views),
        keys.q_lens,
        keys.k_lens,
    )


def _sums(lens: Ints) -> Ints:
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=sums[1:])
    return sums
