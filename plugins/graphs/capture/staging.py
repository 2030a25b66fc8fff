"""Host memory that small copies to the device start from, taken in turns so that none waits for the
one before.
"""

from __future__ import annotations

import torch
from torch import Tensor

TURNS = 16  #: copies that may be under way at once before the host waits for the oldest


class Staging:
    """A ring of pinned buffers of ``size`` bytes; plain memory where the device is the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(TURNS)
        ]
        self._events = [torch.cuda.Event() for _ in range(TURNS if pinned else 0)]
        self._next = 0

    def take(self) -> int:
        """Number of the buffer to write next."""
        at = self._next
        self._next = (self._next + 1) % TURNS
        if self._events:
            self._events[
                at
            ].synchronize()  # long past, unless the device is behind by the whole ring
        return at

    def copy(self, at: int, source: Tensor, target: Tensor) -> None:
        """Enqueue ``source``, which lies in buffer ``at``, to ``target`` on the device; ends that
        buffer's turn.
        """
        target.copy_(source, non_blocking=True)
        if self._events:
            self._events[at].record()
