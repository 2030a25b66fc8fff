"""A paged KV cache with shuffled pages, and batches over it.

Every KV slot that no row of the step may read holds NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Limits
from glowplug.core.step.batch import Batch


@dataclass
class Row:
    """A sequence of ``length`` tokens of which the step computes the last ``queries`` tokens."""

    length: int
    queries: int
    prefill: bool = False


@dataclass
class World:
    """A batch and the cache that it reads.

    Attributes:
        batch: the step.
        rows: the sequences of the step.
        page_size: number of tokens of a page.
        num_pages: number of pages of the pool.
        cached: entry name -> the entry's values for all tokens of each row, [length, *shape].
        pools: entry name -> the backend's cache, [num_pages * page_size, *shape].
    """

    batch: Batch
    rows: list[Row]
    page_size: int
    num_pages: int
    cached: dict[str, list[Tensor]] = field(default_factory=dict)
    pools: dict[str, Tensor] = field(default_factory=dict)

    def fill(
        self,
        name: str,
        shape: tuple[int, ...],
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Make random cache entries, of entry name ``name``, for the tokens of all rows.

        Entries of tokens before the step's own are stored in the pool; the others are returned.

        The values are float32 numbers that ``dtype`` holds exactly.

        Returns:
            The entries of the step's own tokens, [T, *shape].
        """
        pool = torch.full((self.num_pages * self.page_size, *shape), float("nan"))
        pool[0] = 0.0  # scratch, which padding rows read
        history = [
            torch.randn(row.length, *shape, generator=generator).to(dtype).float()
            for row in self.rows
        ]
        first = self.batch.first_key
        for index, row in enumerate(self.rows):
            kv_slots = self.kv_slots_of(index)[first : row.length - row.queries]
            pool[kv_slots] = history[index][first : row.length - row.queries]
        self.cached[name], self.pools[name] = history, pool
        return torch.cat(
            [
                past[past.shape[0] - row.queries :]
                for past, row in zip(history, self.rows, strict=True)
            ]
        )

    def kv_slots_of(self, index: int) -> Tensor:
        """Return the KV slots of a row's tokens, int64 [length]."""
        row = self.rows[index]
        pages = torch.from_numpy(self.batch.pages[index].astype(np.int64))
        kv_slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        return kv_slots[: row.length]

    def move(self, device: str, dtype: torch.dtype) -> None:
        """Move cache and batch to the device; convert the cache to ``dtype``."""
        self.pools = {name: pool.to(device, dtype) for name, pool in self.pools.items()}
        for name in ("page_table", "kv_lens_device", "query_starts", "kv_slots"):
            setattr(self.batch, name, getattr(self.batch, name).to(device))

    def limits(self, kv: tuple[Mapping[str, Tensor], ...] = ()) -> Limits:
        """Return the limits for ``reserve``.

        Args:
            kv: caches of the layers; by default the world's own.
        """
        return Limits(
            rows=len(self.rows),
            context=4096,
            num_pages=self.num_pages,
            width=1,
            vocab=8,
            kv=kv or (self.pools,),
        )


def make_world(rows: list[Row], page_size: int, seed: int, spare_columns: int = 0) -> World:
    """Return a step of ``rows`` over randomly ordered pages, without caches.

    Args:
        rows: the rows, decoding ones first.
        page_size: tokens per page.
        seed: seed of the pages' order.
        spare_columns: number of page-table columns beyond those of the longest row.
    """
    count = len(rows)
    decodes = sum(not row.prefill for row in rows)
    assert all(not row.prefill for row in rows[:decodes]), "decoding rows come first"
    pages, num_pages = _random_pages(rows, page_size, seed, spare_columns)
    batch = Batch(
        step=0,
        mode=Mode.PREFILL if decodes < count else Mode.DECODE,
        rows=np.arange(count, dtype=np.int32),
        epochs=np.zeros(count, np.int64),
        num_decodes=decodes,
        query_lens=np.array([row.queries for row in rows], np.int32),
        kv_lens=np.array([row.length for row in rows], np.int32),
        samples=np.ones(count, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=pages,
    )
    world = World(batch, rows, page_size, num_pages)
    _set_device_fields(world)
    return world


def _set_device_fields(world: World) -> None:
    """Set the fields that the runner would set, on the CPU."""
    batch = world.batch
    starts = np.concatenate([[0], np.cumsum(batch.query_lens)]).astype(np.int32)
    kv_slots = [
        world.kv_slots_of(index)[row.length - row.queries :] for index, row in enumerate(world.rows)
    ]
    batch.page_table = torch.from_numpy(batch.pages)
    batch.kv_lens_device = torch.from_numpy(batch.kv_lens)
    batch.query_starts = torch.from_numpy(starts)
    batch.kv_slots = torch.cat(kv_slots) if kv_slots else torch.zeros(0, dtype=torch.int64)


def _random_pages(
    rows: list[Row], page_size: int, seed: int, spare_columns: int
) -> tuple[NDArray[np.int32], int]:
    """Return random pages for each row, and the number of pages, three of them unused."""
    need = [-(-row.length // page_size) for row in rows]
    num_pages = 1 + sum(need) + 3
    order = np.random.default_rng(seed).permutation(np.arange(1, num_pages))
    pages = np.zeros((len(rows), max(need, default=1) + spare_columns), np.int32)
    at = 0
    for index, count in enumerate(need):
        pages[index, :count] = order[at : at + count]
        at += count
    return pages, num_pages


def random_rows(rng: np.random.Generator, page_size: int, width: int = 1) -> list[Row]:
    """Return up to 7 decoding and 5 prefill rows.

    Most lengths are close to page and chunk boundaries.
    """

    def length() -> int:
        edge = int(rng.integers(1, 6)) * page_size
        return max(
            1, edge + int(rng.integers(-2, 3)) if rng.random() < 0.7 else int(rng.integers(1, 90))
        )

    rows = [Row(length() + width, width) for _ in range(int(rng.integers(0, 8)))]
    for _ in range(int(rng.integers(0 if rows else 1, 6))):
        queries = length()
        prefix = 0 if rng.random() < 0.5 else length()
        rows.append(Row(prefix + queries, queries, prefill=True))
    return rows
