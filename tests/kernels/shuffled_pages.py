"""Rows of a paged cache with pages in any order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def shuffled_pages(
    lengths: list[int], page: int, rng: np.random.Generator, first_key: int = 0, spare: int = 0
) -> tuple[NDArray[np.int32], list[Tensor]]:
    """Return (page table [R, pages of the longest row + spare], each row's KV slots from
    ``first_key`` on). Page 0 belongs to no row, and entries after a row's pages are 0.
    """
    need = [-(-length // page) for length in lengths]
    order = rng.permutation(np.arange(1, 1 + sum(need)))
    table, kv_slots = np.zeros((len(lengths), max(need) + spare), np.int32), []
    for row, (count, length) in enumerate(zip(need, lengths, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        at = np.arange(first_key, length)
        kv_slots.append(torch.from_numpy(table[row][at // page] * page + at % page).long())
    return table, kv_slots


def slots_in_all(lengths: list[int], page: int) -> int:
    """Return the number of KV slots that ``shuffled_pages`` fills: all rows' pages and page 0."""
    return (1 + sum(-(-length // page) for length in lengths)) * page
