"""Copies of a step's small results to the host, through pinned buffers used in rotation.

They also measure how long the device waited for the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUFFERS = 4  #: copies that may be in flight at once; there are fewer steps in flight
ALIGNED = 16  #: alignment of each tensor, in bytes

#: a function (source, target) that enqueues a copy to pinned host memory
Enqueue = Callable[[Tensor, Tensor], None]


@dataclass
class Marks:
    """Events at the beginning and end of one step on the device."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event

    @staticmethod
    def new() -> Marks:
        return Marks(
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )


class Copy:
    """A copy of a step's tensors on the way to the host.

    Call ``wait`` once, before ``BUFFERS`` later copies have begun: the last of them uses the same
    buffer. ``waited`` may be called after ``wait``.

    Args:
        memory: uint8 pinned buffer.
        tensors: the tensors to copy.
        marks: events of this step.
        before: events of the previous step; None: there was none.
        enqueue: the way to copy a tensor.
    """

    def __init__(
        self,
        memory: Tensor,
        tensors: Seq[Tensor],
        marks: Marks,
        before: Marks | None,
        enqueue: Enqueue,
    ) -> None:
        self._marks = marks
        self._before = before
        self._parts: list[Tensor] = []
        at = 0
        for tensor in tensors:
            part = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            enqueue(tensor, part)
            self._parts.append(part)
            at += -(-tensor.nbytes // ALIGNED) * ALIGNED
        marks.ended.record()

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copy and return the values, in memory that later copies do not use."""
        self._marks.ended.synchronize()
        return [np.array(part.numpy()) for part in self._parts]

    def waited(self) -> float:
        """Return the seconds from the end of the previous step's copy to the start of this step.

        The device's own clock measures this time.
        """
        if self._before is None:
            return 0.0
        seconds: float = self._before.ended.elapsed_time(self._marks.begun) / 1e3
        return seconds


class HostCopier:
    """A copier of steps' results from one device to the host, on the current stream.

    For each step call ``mark``, enqueue the step's work, and call ``begin``.

    Args:
        enqueue: the way to copy a tensor; None: the copy engine.
    """

    def __init__(self, enqueue: Enqueue | None = None) -> None:
        self._enqueue = enqueue or _by_copy_engine
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._marks: list[Marks | None] = [None] * BUFFERS
        self._buffer = -1
        self._last: Marks | None = None  # events of the previous copy

    def mark(self) -> None:
        """Mark the beginning of the next step's work on the device."""
        self._buffer = (self._buffer + 1) % BUFFERS
        marks = self._marks[self._buffer] = self._marks[self._buffer] or Marks.new()
        marks.begun.record()

    def begin(self, tensors: Seq[Tensor]) -> Copy:
        """Enqueue copies of the present values of ``tensors`` to the host, without waiting."""
        buffer = self._buffer
        marks = self._marks[self._buffer]
        assert buffer >= 0 and marks is not None, "mark comes first"
        size = sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors)
        if len(self._memory[buffer]) < size:
            self._memory[buffer] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        before = self._last
        self._last = marks
        return Copy(self._memory[buffer], tensors, marks, before, self._enqueue)


def _by_copy_engine(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def host_copier(device: str, enqueue: Enqueue | None) -> HostCopier | None:
    """Return a copier of the results of a torch device; None if the device is the host."""
    return None if device == "cpu" else HostCopier(enqueue)
