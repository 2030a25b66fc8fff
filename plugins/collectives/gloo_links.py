"""Exchange of host data between ranks on several hosts, over a process group of gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

WORLD = "world"  #: name of the group of all ranks, in errors
INLINE_BYTES = 2040  #: bytes of a broadcast that are sent together with its length

Await = Callable[[str, str, Callable[[], Any]], None]


class GlooLinks:
    """The exchange of host data over one group of all ranks.

    Args:
        group: The process group.
        rank: This rank.
        ranks: Number of ranks.
        wait: Function (operation, axis, start) that starts an operation and waits for it; it turns
            errors into a CollectiveError.
    """

    def __init__(self, group: Any, rank: int, ranks: int, wait: Await) -> None:
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._wait = wait

    def broadcast(self, data: bytes | None) -> bytes:
        """Send rank 0's ``data`` to all ranks, and return it on each; other ranks pass None."""
        head = np.zeros(8 + INLINE_BYTES, np.uint8)
        length = head[:8].view(np.int64)
        if data is not None and self._rank == 0:
            inline = np.frombuffer(data[:INLINE_BYTES], np.uint8)
            length[0] = len(data)
            head[8 : 8 + len(inline)] = inline
        self._broadcast(torch.from_numpy(head))
        first = head[8 : 8 + min(int(length[0]), INLINE_BYTES)].tobytes()
        return first + self._rest(data, int(length[0]) - INLINE_BYTES)

    def _rest(self, data: bytes | None, size: int) -> bytes:
        """Return the last ``size`` bytes of rank 0's data; b"" if ``size`` is 0 or negative."""
        if size <= 0:
            return b""
        rest = torch.empty(size, dtype=torch.uint8)
        if data is not None and self._rank == 0:
            rest.numpy()[:] = np.frombuffer(data, np.uint8)[INLINE_BYTES:]
        self._broadcast(rest)
        return rest.numpy().tobytes()

    def _broadcast(self, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._wait("broadcast_bytes", WORLD, lambda: self._group.broadcast([buffer], options))

    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, in order of ranks."""
        sizes = self.gather_numbers(np.array([len(data)], np.int64))[:, 0]
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        every = self._gathered("all_gather_bytes", padded)
        return [row[:size].tobytes() for row, size in zip(every.numpy(), sizes, strict=True)]

    def gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ``values``, int64 [N], of every rank as one array, int64 [ranks, N]."""
        every = self._gathered("all_gather_numbers", torch.from_numpy(values))
        found: NDArray[np.int64] = every.numpy()
        return found

    def _gathered(self, operation: str, part: Tensor) -> Tensor:
        """Return ``part`` [N] of every rank as one tensor, [ranks, N], by all-gather."""
        every = part.new_empty(self._ranks, *part.shape)
        if part.numel():
            self._wait(
                operation,
                WORLD,
                lambda: self._group._allgather_base(every.view(-1), part.contiguous()),
            )
        return every

    def ended(self) -> int | None:
        """Return None: a rank that has ended is noticed in the next exchange only."""
        return None

    def close(self) -> None:
        """Release the group. Idempotent."""
        self._group = None
