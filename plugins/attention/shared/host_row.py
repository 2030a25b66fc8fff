"""A step of one decode row on the CPU, for attention in numpy over a float32 cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.batch import Batch


@dataclass(eq=False)
class HostRow:
    """A step's only row, a decode row, for attention in numpy over a float32 cache on the CPU.

    Attributes:
        kv_slots: int64 [W], KV slots of the step's own tokens, the row's last ones.
        page_size: Tokens per page.
        first: Position of the row's first key in its pages.
        end: Position after the row's last key.
        pages: The row's pages; a slice if they are contiguous and ascending, which allows reading
            them in place.
        hidden: bool [W, n], whether a query of a tree does not see a key of the row's last n; all
            queries see the keys before them. None: queries are causal.
    """

    kv_slots: NDArray[np.int64]
    page_size: int
    first: int
    end: int
    pages: NDArray[np.int32] | slice
    hidden: NDArray[np.bool_] | None = None

    def exchange(self, pool: Tensor, value: Tensor) -> NDArray[np.float32]:
        """Store the row's new entries and return the entries of all its keys, [L, N].

        Args:
            pool: Cache tensor, [kv_slots, N].
            value: New entries, [W, N].
        """
        stored: NDArray[np.float32] = pool.numpy()
        stored[self.kv_slots] = value.numpy()
        size = stored.shape[1]
        return stored.reshape(-1, self.page_size * size)[self.pages].reshape(-1, size)[
            self.first : self.end
        ]


def host_row(batch: Batch, page_size: int, queries: int, keys: int) -> HostRow | None:
    """Return the step as a :class:`HostRow` if it is a single decode row on the CPU, else None.

    The result is None also for a row with more than ``queries`` queries or ``keys`` keys.
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
        batch.kv_slots.numpy(),
        page_size,
        batch.first_key,
        end,
        slice(int(pages[0]), int(pages[-1]) + 1) if neighbours else pages,
        None if batch.tree_mask is None else _hidden(batch, end - batch.first_key),
    )


def _hidden(batch: Batch, keys: int) -> NDArray[np.bool_]:
    """Return ``HostRow.hidden`` of a tree whose row has ``keys`` keys."""
    mask: NDArray[np.int64] = batch.tree_mask[0].numpy()
    span = batch.tree_span or len(mask)
    bits = np.arange(max(0, span - keys), span)
    hidden: NDArray[np.bool_] = (mask[:, None] >> bits & 1) == 0
    return hidden
