"""Groups of GPUs that exchange tensors through each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from glowplug.kernels.collectives.all_reduce import one_shot, two_shot
from glowplug.kernels.collectives.buffer_sizes import WORD_BYTES, buffer_words
from glowplug.kernels.collectives.gather import all_gather, reduce_scatter, rows_that_fit
from glowplug.kernels.collectives.push import (
    EMPTY_BITS,
    SENT_DTYPES,
    PeerBuffers,
    peer_buffers,
)
from glowplug.plugins.collectives.peer_sizes import BufferSize, PeerSizes

NORM_DTYPES = frozenset({torch.bfloat16, torch.float16})  #: dtypes of sums fused with a norm
ALIGNMENT = 128  #: words; each kind of buffers begins at a multiple of it


class Alarm:
    """Memory in which a kernel reports that it waited for a peer's data in vain.

    Attributes:
        fault: int64 [2] on the device. Element 0 is 0, or 1 + the number of the rank whose data are
            missing; element 1 is the address of ``seen``.
        seen: int32 [1] in pinned host memory, a copy of ``fault[0]``, which the host reads
            without waiting for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.fault = torch.tensor([0, self.seen.data_ptr()], dtype=torch.int64, device=device)


class PeerGroup:
    """Collective operations among the GPUs of one mesh axis, through each other's memory.

    Args:
        name: name of the group, unique in this process.
        rank: this rank's number in the group.
        ranks: number of ranks in the group.
        store: the group's part of the rendezvous store.
        sizes: sizes of the group's buffers.
        alarm: memory for reports of peers whose data are missing.
        limit: seconds that a kernel waits for a peer.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: int,
        store: dist.Store,
        sizes: PeerSizes,
        alarm: Alarm,
        limit: float,
    ) -> None:
        self.name: Any = name
        self.ranks = ranks
        self._rank = rank
        self._alarm = alarm
        self._limit = int(limit * 1e9)
        self._memory: list[Any] = []
        # torch finds rank, size and store of a group of symmetric memory by the group's name
        self._group = dist.ProcessGroup(store, rank, ranks)
        # NOTE: torch 2.13 has a type of its own for names, torch 2.11 has not
        c10d._register_process_group(self.name, self._group)  # type: ignore[arg-type,unused-ignore]
        found = self.allocate(sizes)
        self.small, self.large, self.terms, self.sums, self.gather, self.norm = found

    def allocate(self, sizes: Sequence[BufferSize]) -> list[PeerBuffers | None]:
        """Return new buffers of these sizes; None for a capacity of 0.

        All ranks of the group must call this method together.
        """
        words = [
            buffer_words(self.ranks, -(-size.capacity // ALIGNMENT) * ALIGNMENT) for size in sizes
        ]
        device = self._alarm.fault.device
        memory = c10d._SymmetricMemory.empty_strided_p2p(
            (sum(words) // 2,), (1,), torch.int32, device, self.name
        )
        memory.fill_(EMPTY_BITS)
        torch.cuda.synchronize(device)
        handle = c10d._SymmetricMemory.rendezvous(memory, self.name)
        # NOTE: the handle keeps the peers' memory mapped
        self._memory.append((memory, handle))
        found: list[PeerBuffers | None] = []
        offset = 0
        for size, count in zip(sizes, words, strict=True):
            addresses = [address + WORD_BYTES * offset for address in handle.buffer_ptrs]
            offset += count
            found.append(self._buffers(size, addresses) if size.capacity else None)
        return found

    def _buffers(self, size: BufferSize, addresses: Sequence[int]) -> PeerBuffers:
        """Return the buffers of one kind, at ``addresses`` by rank."""
        return peer_buffers(
            self._rank,
            addresses,
            size.capacity,
            size.tile,
            self._alarm.fault,
            self._limit,
            size.tiles,
        )

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """Return the sum of contiguous x over the ranks; None if NCCL is to compute the sum.

        Two ranks send large tensors in pieces, so that they need no buffers of NCCL
        (``NCCL_GROUP_BYTES``).
        """
        for buffers in (self.small, self.large):
            if buffers is not None and buffers.fits(x):
                return one_shot(x, buffers)
        if self.terms is not None and self.sums is not None and self.terms.fits(x, self.ranks):
            return two_shot(x, self.terms, self.sums)
        whole = self.large or self.small
        if self.ranks > 2 or whole is None or x.dtype not in SENT_DTYPES:
            return None
        total = torch.empty_like(x)
        count = whole.words(x)[0]
        for piece, out in zip(x.view(-1).split(count), total.view(-1).split(count)):
            one_shot(piece, whole, out=out)
        return total

    def all_gather(self, x: Tensor, side_by_side: bool) -> Tensor | None:
        """Return x, contiguous [R, N], gathered from every rank; None if NCCL is to gather x.

        Args:
            x: this rank's rows.
            side_by_side: the result is [R, ranks * N] instead of [ranks * R, N].
        """
        buffers = self.gather
        step = 0 if buffers is None else rows_that_fit(x, buffers)
        if buffers is None or not step or (self.ranks > 2 and len(x) > step):
            return None
        rows, columns = x.shape
        shape = (rows, self.ranks, columns) if side_by_side else (self.ranks, rows, columns)
        every = x.new_empty(shape)
        by_row = every if side_by_side else every.transpose(0, 1)
        for start in range(0, rows, step):
            all_gather(x[start : start + step], by_row[start : start + step], buffers)
        return every.flatten(1) if side_by_side else every.flatten(0, 1)

    def reduce_scatter(self, x: Tensor) -> Tensor | None:
        """Sum contiguous x over the ranks and return this rank's rows; None if no buffer fits."""
        fits = self.gather is not None and self.gather.fits(x, self.ranks)
        return reduce_scatter(x, self.gather) if fits and self.gather is not None else None

    def reduce_scatter_exact(self, x: Tensor) -> Tensor | None:
        """Sum contiguous x [ranks, N, ...] over the ranks and return this rank's part in float32.

        Two ranks send large tensors in pieces. The result is None if no buffer fits.
        """
        buffers = self.gather
        if buffers is None or x.dtype not in SENT_DTYPES:
            return None
        if buffers.fits(x, self.ranks):
            return reduce_scatter(x.flatten(0, 1), buffers, dtype=torch.float32)
        row = x[0, 0].numel() * x.element_size()
        step = WORD_BYTES * buffers.capacity // row
        if self.ranks > 2 or not step:
            return None
        total = x.new_empty(x.shape[1:], dtype=torch.float32)
        for piece, out in zip(x.split(step, 1), total.split(step)):
            reduce_scatter(piece.flatten(0, 1), buffers, out=out)
        return total

    def norm_buffers(self, residual: Tensor) -> PeerBuffers | None:
        """Return the buffers for a sum over ranks fused with a norm; None if they are too small.

        Args:
            residual: [T, hidden].
        """
        buffers = self.norm
        if buffers is None or residual.dtype not in NORM_DTYPES:
            return None
        rows, size = residual.shape
        return buffers if size <= buffers.tile and rows * buffers.tile <= buffers.capacity else None

    def close(self) -> None:
        """Release the group's name, so that another engine of this process can use the name."""
        c10d._unregister_process_group(self.name)
