"""A step's small results on their way to the host, through pinned memory that is used in turns; and
how long the device waited for the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TURNS = 4  #: copies that may be under way at once; steps in flight are fewer
ALIGNED = 16  #: bytes at which each tensor begins


@dataclass
class Marks:
    """Where one turn begins and ends on the device."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event

    @staticmethod
    def new() -> Marks:
        return Marks(
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )


class Copy:
    """Tensors being copied. ``wait`` may be called once, before ``TURNS`` more copies have begun;
    ``waited`` after it.
    """

    def __init__(
        self, memory: Tensor, tensors: Seq[Tensor], marks: Marks, before: Marks | None
    ) -> None:
        self._marks = marks
        self._before = before
        self._parts: list[Tensor] = []
        at = 0
        for tensor in tensors:
            part = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._parts.append(part.copy_(tensor, non_blocking=True))
            at += -(-tensor.nbytes // ALIGNED) * ALIGNED
        marks.ended.record()

    def wait(self) -> list[NDArray[Any]]:
        """The tensors' values, in memory of their own."""
        self._marks.ended.synchronize()
        return [np.array(part.numpy()) for part in self._parts]

    def waited(self) -> float:
        """Seconds from the end of the copy before to this step's beginning, as the device's own
        clock says.
        """
        return (
            0.0
            if self._before is None
            else self._before.ended.elapsed_time(self._marks.begun) / 1e3
        )


class HostCopier:
    """Copies from one device, on its current stream. A turn: ``mark``, the step's work, ``begin``."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(TURNS)]
        self._marks: list[Marks | None] = [None] * TURNS
        self._turn = -1
        self._last: Marks | None = None  # of the copy before

    def mark(self) -> None:
        """What is enqueued from now on is the next step's work."""
        self._turn = (self._turn + 1) % TURNS
        marks = self._marks[self._turn] = self._marks[self._turn] or Marks.new()
        marks.begun.record()

    def begin(self, tensors: Seq[Tensor]) -> Copy:
        """Enqueue copies of ``tensors`` as they are now; nothing waits."""
        turn = self._turn
        marks = self._marks[self._turn]
        assert turn >= 0 and marks is not None, "mark comes first"
        size = sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors)
        if len(self._memory[turn]) < size:
            self._memory[turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        before = self._last
        self._last = marks
        return Copy(self._memory[turn], tensors, marks, before)
