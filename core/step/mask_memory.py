"""Copies of masks to the device, beside the model's pass and through pinned buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS_OF_PLACE = 2  #: int32 words of an int64


@dataclass
class MaskMarks:
    """Events around the time in which the device waits for a mask."""

    passed: torch.cuda.Event  #: the model's pass has ended
    copied: torch.cuda.Event  #: the masks are on the device
    ready: torch.cuda.Event  #: both
    used: torch.cuda.Event  #: the masks have been applied

    @staticmethod
    def new() -> MaskMarks:
        return MaskMarks(
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(),
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(),
        )


class MaskBuffer:
    """Memory for the masks of a step, on the host and on the device.

    For each step call ``take``, fill the arrays, call ``passed`` and ``apply``. Two buffers are
    used in turn. ``take`` waits for the last use of the memory, the other methods do not wait.

    Args:
        words: int32 words of a mask.
        device: the device. If it is the host, there are no copies.
        side: stream of the copies; None if the device is the host.
    """

    def __init__(self, words: int, device: torch.device, side: torch.cuda.Stream | None) -> None:
        self._words = words
        self._device = device
        self._side = side
        self._count = 0
        self._most = 0
        # places, int64, and behind them masks
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied = self._host
        # views of the memory for ``_count`` masks: to be filled, as arrays, and to be applied
        self._filled = self._parts(self._host)
        self._arrays = self._filled[0].numpy(), self._filled[1].numpy()
        self._applied = self._filled
        self._marks = None if side is None else MaskMarks.new()
        self._pending = False

    def take(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return memory for the masks of ``count`` positions.

        Returns:
            Rows of the logits [count], and masks [count, words].
        """
        if self._pending and self._marks is not None:
            self._marks.used.synchronize()
            self._pending = False
        if self._most < count:
            self._grow(max(count, 2 * self._most))
        if self._count != count:
            self._count = count
            self._filled = self._parts(self._host)
            self._applied = self._filled if self._side is None else self._parts(self._copied)
            self._arrays = self._filled[0].numpy(), self._filled[1].numpy()
        return self._arrays

    def _grow(self, most: int) -> None:
        """Allocate memory for ``most`` masks, or one more.

        NOTE: an even number of places keeps the masks behind them at multiples of 16 bytes. Kernels
        have a variant for each alignment, and a request would wait for the second one's compiler.
        """
        self._most = most + most % 2
        size = self._most * (WORDS_OF_PLACE + self._words)
        pinned = self._side is not None
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        self._copied = self._host
        if self._side is not None:
            self._copied = torch.empty(size, dtype=torch.int32, device=self._device)
            # work that is enqueued may still use the memory, which torch gives out again
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        self._count = -1

    def passed(self) -> None:
        """Mark the end of the model's pass on the device."""
        if self._marks is not None:
            self._marks.passed.record()

    def late(self) -> bool:
        """Return whether the device has finished the pass already, and waits for the masks."""
        return self._marks is not None and self._marks.passed.query()

    def apply(self, forbid: Callable[[Tensor, Tensor], None]) -> None:
        """Copy the rows and masks to the device, and call ``forbid`` with them after the pass.

        The copy runs on a stream of its own, while the current stream runs the pass.
        """
        marks = self._marks
        if marks is None or self._side is None:
            forbid(*self._applied)
            return
        used = self._most * WORDS_OF_PLACE + self._count * self._words
        with torch.cuda.stream(self._side):
            self._copied[:used].copy_(self._host[:used], non_blocking=True)
        marks.copied.record(self._side)
        marks.copied.wait(torch.cuda.current_stream(self._device))
        marks.ready.record()
        forbid(*self._applied)
        marks.used.record()
        self._pending = True

    def waited(self) -> float:
        """Return the seconds on the device between the pass and the masks of the last ``apply``.

        The results of that step have been waited for. The value is at least the time between two
        adjacent events, 1 to 2 us.
        """
        if self._marks is None or not self._pending:
            return 0.0
        self._marks.used.synchronize()
        seconds: float = self._marks.passed.elapsed_time(self._marks.ready) / 1e3
        return seconds

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return places, int64 [count], and masks, int32 [count, words], in ``memory``."""
        places = memory[: self._most * WORDS_OF_PLACE].view(torch.int64)
        masks = memory[self._most * WORDS_OF_PLACE :].view(self._most, self._words)
        return places[: self._count], masks[: self._count]
