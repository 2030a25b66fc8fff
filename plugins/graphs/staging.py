"""Host memory that small copies to the device start from, taken in turns so that none waits for the one before."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TURNS = 16  #: copies that may be under way at once before the host waits for the oldest


class Staging:
    """A ring of pinned buffers of ``size`` bytes; plain memory where the device is the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(TURNS)]
        self._events = [torch.cuda.Event() for _ in range(TURNS if self._pinned else 0)]  # type: ignore[no-untyped-call]
        self._next = 0

    @contextmanager
    def turn(self, size: int) -> Iterator[Tensor]:
        """uint8 [size] to write and to copy from within the block, by copies enqueued on the current stream."""
        at, self._next = self._next, (self._next + 1) % TURNS
        if self._pinned:
            self._events[at].synchronize()  # long past, unless the device is behind by the whole ring
        yield self._buffers[at][:size]
        if self._pinned:
            self._events[at].record()
