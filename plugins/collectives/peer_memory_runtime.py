"""Runtime of the collectives "peer_memory": small and medium tensors go through peers' memory.

NCCL, which is the base class, exchanges tensors that no buffer fits, and all tensors of GPUs that
cannot access each other's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from glowplug.core.errors import CollectiveError
from glowplug.core.layers.linear import FORMAT_PLAIN, Both, both_formats
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Parts, Quantized, Worker
from glowplug.kernels.collectives.add_norm import add_rms_norm
from glowplug.kernels.collectives.all_reduce import one_shot, two_shot
from glowplug.kernels.collectives.buffer_sizes import buffer_words
from glowplug.kernels.collectives.gather import all_gather, reduce_scatter, rows_that_fit
from glowplug.kernels.collectives.push import (
    EMPTY_BITS,
    SENT_DTYPES,
    PeerBuffers,
    peer_buffers,
)
from glowplug.kernels.formats.fp8_block import FP8_INPUT
from glowplug.kernels.formats.fp8_triton import empty_quantized
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.collectives.peer_memory import PeerMemoryOptions
from glowplug.plugins.collectives.peer_sizes import PeerSizes, peer_sizes
from glowplug.plugins.collectives.torch_distributed_runtime import Nccl

logger = logging.getLogger("glowplug")
NORM_DTYPES = frozenset({torch.bfloat16, torch.float16})  #: dtypes of sums fused with a norm
ALIGNMENT = 128  #: words; each kind of buffers begins at a multiple of it


class NormResult(NamedTuple):
    """The forms in which a norm stores its results: plain, quantised or both.

    Attributes:
        plain: the norm stores a result in the activation dtype.
        quantized: the norm stores a result as E4M3 values and scales.
    """

    plain: bool
    quantized: bool

    def empty(self, like: Tensor) -> Tensor | Quantized | Both:
        """Allocate the results for rows of the shape of ``like`` [T, hidden]."""
        if not self.quantized:
            return torch.empty_like(like)
        rows, size = like.shape
        cast = Quantized(*empty_quantized(rows, size, like.device))
        return Both(torch.empty_like(like), cast) if self.plain else cast

    @staticmethod
    def tensors(result: Tensor | Quantized | Both) -> tuple[Tensor | None, Quantized | None]:
        """Return the plain and the quantised tensors of a result."""
        if isinstance(result, Both):
            return result.plain, result.cast
        return (None, result) if isinstance(result, Quantized) else (result, None)


#: input format of a norm's readers -> the form of its results
NORM_FORMATS = {
    FORMAT_PLAIN: NormResult(plain=True, quantized=False),
    FP8_INPUT: NormResult(plain=False, quantized=True),
    both_formats(FP8_INPUT): NormResult(plain=True, quantized=True),
}


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
        # torch finds rank, size and store of a group of symmetric memory by the group's name
        self._group = dist.ProcessGroup(store, rank, ranks)
        # NOTE: torch 2.13 has a type of its own for names, torch 2.11 has not
        c10d._register_process_group(self.name, self._group)  # type: ignore[arg-type,unused-ignore]
        words = [buffer_words(ranks, -(-size.capacity // ALIGNMENT) * ALIGNMENT) for size in sizes]
        self.memory = c10d._SymmetricMemory.empty_strided_p2p(
            (sum(words) // 2,), (1,), torch.int32, alarm.fault.device, name
        )
        self.memory.fill_(EMPTY_BITS)
        torch.cuda.synchronize(alarm.fault.device)
        # NOTE: the handle keeps the peers' memory mapped
        self._handle = c10d._SymmetricMemory.rendezvous(self.memory, name)
        found: list[PeerBuffers | None] = []
        offset = 0
        for size, count in zip(sizes, words, strict=True):
            addresses = [address + 2 * offset for address in self._handle.buffer_ptrs]
            offset += count
            found.append(
                peer_buffers(
                    rank,
                    addresses,
                    size.capacity,
                    size.tile,
                    alarm.fault,
                    int(limit * 1e9),
                    size.tiles,
                )
                if size.capacity
                else None
            )
        self.small, self.large, self.terms, self.sums, self.gather, self.norm = found

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """Return the sum of contiguous x over the ranks; None if NCCL is to compute the sum.

        Two ranks send large tensors in pieces, so that they need no buffers of NCCL (870 MB for two
        H200).
        """
        for buffers in (self.small, self.large):
            if buffers is not None and buffers.fits(x):
                return one_shot(x, buffers)
        if self.terms is not None and self.sums is not None and self.terms.fits(x, self.ranks):
            return two_shot(x, self.terms, self.sums)
        whole = self.large or self.small
        if self.ranks > 2 or whole is None or x.dtype not in SENT_DTYPES:
            return None
        pieces = x.view(-1).split(whole.words(x)[0])
        return torch.cat([one_shot(piece, whole) for piece in pieces]).view(x.shape)

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


class PeerMemory(Nccl):
    """The ``Collectives`` of the GPUs of one host.

    Attributes:
        replaced: reason why NCCL does all exchanges; "" while peers' memory is used.
    """

    def __init__(
        self,
        options: PeerMemoryOptions,
        plan: EnginePlan,
        worker: Worker,
        store: dist.Store | None = None,
    ) -> None:
        super().__init__(options, plan, worker, store)
        self._peers: dict[tuple[int, ...], PeerGroup] = {}
        self._alarm = Alarm(torch.device(worker.device))
        reason = self._connect(plan, options.timeout)
        # NOTE: ranks exchange in the same way or they would wait for each other for ever
        reasons = [found.decode() for found in self.all_gather_bytes(reason.encode())]
        self.replaced = next(filter(None, reasons), "")
        if self.replaced:
            self._forget()
            if worker.rank == 0:
                logger.warning("ranks exchange by NCCL alone, which is slower: %s", self.replaced)
        self._peer_of = {
            axis: self._peers[members]
            for axis, members in self._members.items()
            if members in self._peers
        }

    def _connect(self, plan: EnginePlan, limit: float) -> str:
        """Connect this rank to its peers on every mesh axis.

        Returns:
            "", or the reason why the GPUs cannot use each other's memory.
        """
        own = torch.device(self._device).index or 0
        groups = sorted(set(self._members.values()))
        for members in groups:
            for peer in members:
                if peer != self._rank and not torch.cuda.can_device_access_peer(own, peer):
                    return f"GPU {own} has no access to the memory of GPU {peer}"
        sizes = plan.sizes
        try:
            for members in groups:
                name = f"glowplug {'-'.join(map(str, members))} {id(self._store):x}"
                self._peers[members] = PeerGroup(
                    name,
                    members.index(self._rank),
                    len(members),
                    self._part(members, "peers"),
                    peer_sizes(len(members), plan.facts.model.hidden_size, sizes.max_step_tokens),
                    self._alarm,
                    limit,
                )
        except RuntimeError as error:
            return f"symmetric memory is not available: {str(error).splitlines()[0]}"
        return ""

    def _forget(self) -> None:
        for peers in self._peers.values():
            peers.close()
        self._peers.clear()

    def check(self) -> None:
        """Raise an error if a kernel has waited for a peer's data in vain.

        Raises:
            CollectiveError: a peer has not sent its data in time.
        """
        source = int(self._alarm.seen.numpy()[0])
        if source:
            raise CollectiveError(
                f"rank {self._rank} of {self._ranks} waited {self._timeout.total_seconds():g} s on "
                f"its GPU for the data of rank {source - 1} of an exchange"
            )

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        peers = self._peer_of.get(axis)
        found = None if peers is None else peers.all_reduce(x.contiguous())
        return super().all_reduce(x, axis) if found is None else found

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        peers = self._peer_of.get(axis)
        last = dim in (-1, x.dim() - 1) and x.dim() > 1
        if peers is not None and x.numel() and (dim == 0 or last and x.dim() == 2):
            flat = x.contiguous().view(len(x), -1)
            every = peers.all_gather(flat, side_by_side=last)
            if every is not None:
                return every if last else every.view(-1, *x.shape[1:])
        return super().all_gather(x, axis, dim)

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        peers = self._peer_of.get(axis)
        found = None if peers is None else peers.reduce_scatter(x.contiguous())
        return super().reduce_scatter(x, axis) if found is None else found

    def reduced_norm(self, input_format: str, add_norm: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that sums tensors over the ranks, adds a residual and applies a norm.

        Args:
            input_format: format of the norm's results.
            add_norm: residual addition and norm with results in this format, used for tensors that
                fit no buffer.
        """
        kind = NORM_FORMATS.get(input_format)

        def reduce(
            terms: Tensor | Parts, axis: str, residual: Tensor, weight: Tensor, eps: float
        ) -> tuple[Any, Tensor]:
            rows, ids = terms if isinstance(terms, Parts) else (terms, None)
            peers = self._peer_of.get(axis)
            buffers = peers.norm_buffers(residual) if peers is not None and kind else None
            if kind is None or buffers is None:
                whole = rows if ids is None else moe_sum(rows, ids)
                total = self.all_reduce(whole.to(residual.dtype), axis)
                return add_norm(total, residual, weight, eps)  # type: ignore[no-any-return]
            result = kind.empty(residual)
            plain, quantized = kind.tensors(result)
            total = add_rms_norm(
                rows, residual, weight, eps, buffers, ids=ids, plain=plain, quantized=quantized
            )
            return result, total

        return reduce

    def close(self) -> None:
        self._peer_of.clear()
        self._forget()
        super().close()
