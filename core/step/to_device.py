"""Where tokens go in the paged cache, computed on the device; rows looked up there; small host
arrays sent there in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 4  #: bytes
ALIGNED = 4  #: words at multiples of which each part begins
INT = np.dtype(np.int32)
ON_DEVICE = {INT: torch.int32, np.dtype(np.int64): torch.int64}
FEW = 16  #: rows that ``index_select`` copies one after the other on a CUDA device


def slots_at(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Cache slots int64 [B, W] of ``positions`` int64 [B, W] in the rows of ``page_table`` int32
    [B, P].

    A position behind the table's last column goes to the scratch page, as unused entries of the
    table do.
    """
    columns = page_table.shape[1]
    wanted = positions.div(page_size, rounding_mode="floor")
    pages = page_table.gather(1, wanted.clamp(max=columns - 1)).long()
    pages = pages.masked_fill_(wanted >= columns, 0)
    return pages * page_size + positions % page_size


def rows_at(table: Tensor, at: Tensor) -> Tensor:
    """The rows ``at`` int64 [N] of ``table`` [R, ...]: [N, ...].

    NOTE: ``index_select`` takes 7 us for 8 rows of 4 KB and 2 us for 32; indexing copies all at
    once, however few.
    """
    return table[at] if 1 < len(at) <= FEW and at.is_cuda else table.index_select(0, at)


def send(parts: Seq[NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """One-dimensional integer ``parts`` on ``device``, those of int64 as such and all others as
    int32: one copy, which the host does not wait for.

    NOTE: each begins at a multiple of 16 bytes. Triton compiles a kernel anew for pointers of
    another alignment, in the middle of serving where it depends on the lengths of a step.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(part.astype(width(part))) for part in parts)
    return sent(parts, lambda size: torch.empty(size, dtype=torch.int32, pin_memory=True), device)


def sent(
    parts: Seq[NDArray[Any]], pinned: Callable[[int], Tensor], device: torch.device
) -> tuple[Tensor, ...]:
    """As :func:`send`, by way of memory that ``pinned`` makes: int32 of so many words.

    NOTE: torch keeps pinned memory that was given back until the copies out of it have happened.
    """
    places = []
    end = 0
    for part in parts:
        size = len(part) * width(part).itemsize // WORD
        places.append(slice(end, end + size))
        end += -(-size // ALIGNED) * ALIGNED
    packed = pinned(end)
    memory = packed.numpy()
    for part, place in zip(parts, places):
        memory[place].view(width(part))[:] = part
    on_device = packed.to(device, non_blocking=True)
    return tuple(
        on_device[place].view(ON_DEVICE[width(part)]) for part, place in zip(parts, places)
    )


def width(part: NDArray[Any]) -> np.dtype[Any]:
    """What its numbers are on the device."""
    return part.dtype if part.dtype in ON_DEVICE else INT
