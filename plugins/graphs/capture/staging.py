"""Pinned host buffers for small copies to the device, by a kernel.

The buffers are used in rotation, so that no copy waits for the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.launch.host_copy import copy_small

BUFFERS = 16  #: copies that may be in flight before the host waits for the oldest one


class Staging:
    """A ring of host buffers of ``size`` bytes for copies to ``device``; pinned if it is a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)
        ]
        self._events = [torch.cuda.Event() for _ in range(BUFFERS if pinned else 0)]
        self._next = 0

    def take(self) -> int:
        """Return the index of the next buffer to write, waiting until it is free."""
        at = self._next
        self._next = (self._next + 1) % BUFFERS
        if self._events:
            # already completed, unless the device is behind by the whole ring
            self._events[at].synchronize()
        return at

    def copy(self, at: int, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy to ``target`` on the device from ``source``, a view of buffer ``at``.

        The buffer is free again when the copy has completed.
        """
        if self._events:
            copy_small(source, target)
            self._events[at].record()
        else:
            target.copy_(source)
