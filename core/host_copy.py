"""A step's small results on their way to the host, through pinned memory that is used in turns."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TURNS = 4  #: copies that may be under way at once; steps in flight are fewer
ALIGNED = 16  #: bytes at which each tensor begins


class Copy:
    """Tensors being copied. ``wait`` may be called once, before ``TURNS`` more copies have begun."""

    def __init__(self, memory: Tensor, tensors: Seq[Tensor], event: torch.cuda.Event) -> None:
        self._event = event
        self._parts: list[Tensor] = []
        at = 0
        for tensor in tensors:
            part = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._parts.append(part.copy_(tensor, non_blocking=True))
            at += -(-tensor.nbytes // ALIGNED) * ALIGNED
        event.record()

    def wait(self) -> list[NDArray[Any]]:
        """The tensors' values, in memory of their own."""
        self._event.synchronize()
        return [np.array(part.numpy()) for part in self._parts]


class HostCopier:
    """Copies from one device, on its current stream."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(TURNS)]
        self._events: list[torch.cuda.Event | None] = [None] * TURNS
        self._next = 0

    def begin(self, tensors: Seq[Tensor]) -> Copy:
        """Enqueue copies of ``tensors`` as they are now; nothing waits."""
        turn, self._next = self._next, (self._next + 1) % TURNS
        size = sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors)
        if len(self._memory[turn]) < size:
            self._memory[turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        event = self._events[turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._events[turn] = event
        return Copy(self._memory[turn], tensors, event)
