"""Device helpers: the slot mapping of tokens, row look-ups, and copies of small host arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 4  #: bytes of a word
ALIGNED = 4  #: alignment of each part, in words
INT = np.dtype(np.int32)  #: dtype of arrays that are not int64
#: torch dtype by numpy dtype
ON_DEVICE = {INT: torch.int32, np.dtype(np.int64): torch.int64}
#: most rows that ``index_select`` copies one after the other on a CUDA device
FEW_ROWS_MAX = 16


def kv_slots_at(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return the slot mapping: the KV slots of ``positions``.

    A position behind the table's last column is mapped to the scratch page, like unused entries of
    the table.

    Args:
        page_table: int32 [B, P].
        positions: int64 [B, W].
        page_size: tokens per page.

    Returns:
        int64 [B, W].
    """
    columns = page_table.shape[1]
    wanted = positions.div(page_size, rounding_mode="floor")
    pages = page_table.gather(1, wanted.clamp(max=columns - 1)).long()
    pages = pages.masked_fill_(wanted >= columns, 0)
    return pages * page_size + positions % page_size


def rows_at(table: Tensor, at: Tensor) -> Tensor:
    """Return the rows ``at`` (int64 [N]) of ``table`` [R, ...], as [N, ...].

    NOTE: ``index_select`` takes 7 us for 8 rows of 4 KB and 2 us for 32; indexing copies all rows
    at once even if they are few.
    """
    return table[at] if 1 < len(at) <= FEW_ROWS_MAX and at.is_cuda else table.index_select(0, at)


def send(parts: Seq[NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy one-dimensional integer arrays ``parts`` to ``device`` in one asynchronous copy.

    Arrays of int64 keep their dtype; all others become int32.

    NOTE: each part begins at a multiple of 16 bytes. Triton recompiles a kernel for pointers of
    another alignment, which would happen while serving if the alignment depended on the lengths of
    a step.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(part.astype(device_dtype(part))) for part in parts)
    return send_pinned(
        parts, lambda size: torch.empty(size, dtype=torch.int32, pin_memory=True), device
    )


def send_pinned(
    parts: Seq[NDArray[Any]], pinned: Callable[[int], Tensor], device: torch.device
) -> tuple[Tensor, ...]:
    """Copy arrays to ``device`` like :func:`send`, through pinned memory.

    NOTE: torch keeps freed pinned memory until the copies out of it have completed.

    Args:
        parts: the arrays.
        pinned: function that returns a pinned int32 tensor of the given number of elements.
        device: torch device.
    """
    places = []
    end = 0
    for part in parts:
        size = len(part) * device_dtype(part).itemsize // WORD
        places.append(slice(end, end + size))
        end += -(-size // ALIGNED) * ALIGNED
    packed = pinned(end)
    memory = packed.numpy()
    for part, place in zip(parts, places):
        memory[place].view(device_dtype(part))[:] = part
    on_device = packed.to(device, non_blocking=True)
    return tuple(
        on_device[place].view(ON_DEVICE[device_dtype(part)]) for part, place in zip(parts, places)
    )


def device_dtype(part: NDArray[Any]) -> np.dtype[Any]:
    """Return the dtype that an array has on the device: its own, or int32."""
    return part.dtype if part.dtype in ON_DEVICE else INT
