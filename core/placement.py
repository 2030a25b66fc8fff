"""Where tokens go in the paged cache, computed on the device; rows looked up there; small host arrays sent there in one
copy."""
from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 4  #: words at multiples of which each part begins
FEW = 16  #: rows that ``index_select`` copies one after the other on a CUDA device


def slots_at(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Cache slots int64 [B, W] of ``positions`` int64 [B, W] in the rows of ``page_table`` int32 [B, P].

    A position behind the table's last column goes to the scratch page, as unused entries of the table do.
    """
    columns = page_table.shape[1]
    wanted = positions.div(page_size, rounding_mode="floor")
    pages = page_table.gather(1, wanted.clamp(max=columns - 1)).long()
    pages = pages.masked_fill_(wanted >= columns, 0)
    return pages * page_size + positions % page_size


def rows_at(table: Tensor, at: Tensor) -> Tensor:
    """The rows ``at`` int64 [N] of ``table`` [R, ...]: [N, ...].

    NOTE: ``index_select`` takes 7 us for 8 rows of 4 KB and 2 us for 32; indexing copies all at once, however few.
    """
    return table[at] if 1 < len(at) <= FEW and at.is_cuda else table.index_select(0, at)


def send(parts: Seq[NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """One-dimensional integer ``parts`` on ``device``, those of int64 as such and all others as int32: one copy, which
    the host does not wait for.

    NOTE: each begins at a multiple of 16 bytes. Triton compiles a kernel anew for pointers of another alignment, in the
    middle of serving where it depends on the lengths of a step.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(part.astype(np.int64 if words(part) == 2 else np.int32)) for part in parts)
    return sent(parts, lambda size: torch.empty(size, dtype=torch.int32, pin_memory=True), device)


def sent(parts: Seq[NDArray[Any]], pinned: Callable[[int], Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """As :func:`send`, by way of memory that ``pinned`` makes: int32 of so many words.

    NOTE: torch keeps pinned memory that was given back until the copies out of it have happened.
    """
    starts = [0]
    for part in parts:
        starts.append(starts[-1] - -len(part) * words(part) // ALIGNED * ALIGNED)
    packed = pinned(starts[-1])
    memory = packed.numpy()
    for part, start in zip(parts, starts):
        room = memory[start : start + len(part) * words(part)]
        (room.view(np.int64) if words(part) == 2 else room)[:] = part
    on_device, found = packed.to(device, non_blocking=True), []
    for part, start in zip(parts, starts):
        there = on_device[start : start + len(part) * words(part)]
        found.append(there.view(torch.int64) if words(part) == 2 else there)
    return tuple(found)


def words(part: NDArray[Any]) -> int:
    """Of four bytes, that a number takes on the device."""
    return 2 if part.dtype == np.int64 else 1
