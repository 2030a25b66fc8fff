"""Process groups of torch.distributed, one for each set of ranks that an axis connects.

The groups are built straight over a store: there is no default group and no global state, so ranks
may be processes or threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.errors import CollectiveError
from glowplug.core.facts.mesh import OVER_TP, WITHIN, axis_size, group
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.kernels.launch.sums import add_up
from glowplug.plugins.collectives.rendezvous import await_ranks, open_store, own_address
from glowplug.plugins.collectives.torch_distributed import TorchDistributedOptions

AXES = ("tp", "pp", *OVER_TP, *WITHIN)
WORLD = "world"
INLINE = 2040  #: bytes of a broadcast that travel with its length
GATHERED = 1 << 13  #: numbers few enough to send all of them to every rank and add them up there


class Gloo:
    """``Collectives`` among CPUs. Every rank calls the same methods in the same order.

    ``store`` replaces the one at ``worker.rendezvous``.
    """

    def __init__(
        self,
        options: TorchDistributedOptions,
        plan: EnginePlan,
        worker: Worker,
        store: dist.Store | None = None,
    ) -> None:
        self._rank = worker.rank
        self._ranks = worker.ranks
        self._device = worker.device
        self._timeout = timedelta(seconds=options.timeout)
        self._interface = options.interface
        self._rendezvous = worker.rendezvous
        self._groups: dict[tuple[int, ...], Any] = {}
        self._of: dict[str, Any] = {}
        self._store = store or open_store(
            worker.rendezvous, worker.rank, worker.ranks, options.timeout
        )
        await_ranks(self._store, worker.rank, worker.ranks, options.timeout, "start")
        self._host = self._call(
            "connecting", WORLD, lambda: self._host_group(tuple(range(worker.ranks)), WORLD)
        )
        for axis in AXES:
            if axis_size(axis, plan.mesh) > 1:
                self._of[axis] = self._shared(axis, group(axis, self._rank, plan.mesh))
        # NOTE: a rank that fails and goes while others still connect to it would end them in its
        # place.
        await_ranks(self._store, worker.rank, worker.ranks, options.timeout, "connect")

    def _shared(self, axis: str, members: tuple[int, ...]) -> Any:
        """The group of an axis; axes that connect the same ranks share one."""
        if members not in self._groups:
            self._groups[members] = self._call(
                "connecting", axis, lambda: self._axis_group(members)
            )
        return self._groups[members]

    def _axis_group(self, members: tuple[int, ...]) -> Any:
        return self._host_group(members, "axis")

    def _host_group(self, members: tuple[int, ...], name: str) -> Any:
        store = self._part(members, name)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [self._network()]
        return dist.ProcessGroupGloo(store, members.index(self._rank), len(members), options)

    def _part(self, members: tuple[int, ...], name: str) -> dist.Store:
        """The corner of the store for one group."""
        return dist.PrefixStore(f"{name} {'-'.join(map(str, members))}", self._store)

    def _network(self) -> Any:
        if self._interface:
            return dist.ProcessGroupGloo.create_device(interface=self._interface)
        return dist.ProcessGroupGloo.create_device(hostname=own_address(self._rendezvous))

    def _call(self, operation: str, axis: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (RuntimeError, OSError) as error:
            raise CollectiveError(
                f"{operation} over {axis} failed on rank {self._rank} of {self._ranks}: {error}"
            ) from error

    def _await(self, operation: str, axis: str, start: Callable[[], Any]) -> None:
        self._call(operation, axis, lambda: start().wait())

    # ---- over an axis, on the device -------------------------------------------------------------

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        members = self._of.get(axis)
        if members is None or not x.numel():
            return x
        return self._sum(members, x.contiguous(), axis)

    def _sum(self, members: Any, x: Tensor, axis: str) -> Tensor:
        """NOTE: gloo's ring adds in an order that depends on where in x a number lies, so from
        three ranks on a token's bits would depend on its neighbours. Here every number is added up
        in float32 and in order of rank.
        """
        ranks = members.size()
        if ranks <= 2:  # two terms have one order only
            self._await("all_reduce", axis, lambda: members.allreduce([x]))
            return x
        if x.numel() <= GATHERED:
            return add_up(self._gathered(members, x, "all_reduce", axis)).to(x.dtype)
        slices = F.pad(x.view(-1), (0, -x.numel() % ranks)).view(ranks, -1)
        own = add_up(self._exchanged(members, slices, "all_reduce", axis)).to(x.dtype)
        return self._gathered(members, own, "all_reduce", axis).view(-1)[: x.numel()].view(x.shape)

    def _gathered(self, members: Any, part: Tensor, operation: str, axis: str) -> Tensor:
        """part [...], contiguous -> [ranks, ...]."""
        every = part.new_empty(members.size(), *part.shape)
        if part.numel():
            self._await(
                operation, axis, lambda: members._allgather_base(every.view(-1), part.view(-1))
            )
        return every

    def _exchanged(self, members: Any, sent: Tensor, operation: str, axis: str) -> Tensor:
        """sent [ranks, ...], contiguous -> [ranks, ...]."""
        received = torch.empty_like(sent)
        self._await(operation, axis, lambda: members.alltoall_base(received, sent, [], []))
        return received

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        members = self._of.get(axis)
        if members is None:
            return x
        every = self._gathered(members, x.contiguous(), "all_gather", axis)
        return every.flatten(0, 1) if dim == 0 else torch.cat(every.unbind(0), dim)

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        members = self._of.get(axis)
        if members is None:
            return x
        terms = x.contiguous()
        total = terms.new_empty(len(terms) // members.size(), *terms.shape[1:])
        if terms.numel():
            self._await("reduce_scatter", axis, lambda: members._reduce_scatter_base(total, terms))
        return total

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        members = self._of.get(axis)
        if members is None or not x.numel():
            return x
        return self._exchanged(members, x.contiguous(), "all_to_all", axis)

    def all_to_all_rows(
        self, x: Tensor, counts: Sequence[int], received: Sequence[int], axis: str
    ) -> Tensor:
        members = self._of.get(axis)
        if members is None:
            return x
        sent = x.contiguous()
        arrived = sent.new_empty(sum(received), *sent.shape[1:])
        self._await(
            "all_to_all_rows",
            axis,
            lambda: members.alltoall_base(arrived, sent, list(received), list(counts)),
        )
        return arrived

    # ---- among all ranks, on the host ------------------------------------------------------------

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        head = torch.zeros(8 + INLINE, dtype=torch.uint8)
        if self._rank == 0:
            assert data is not None, "rank 0 has the bytes"
            head.numpy()[:8].view(np.int64)[0] = len(data)
            head.numpy()[8 : 8 + len(data[:INLINE])] = np.frombuffer(data[:INLINE], np.uint8)
        self._broadcast(head)
        size = int(head.numpy()[:8].view(np.int64)[0])
        first = head.numpy()[8 : 8 + min(size, INLINE)].tobytes()
        if size <= INLINE:
            return first
        rest = torch.empty(size - INLINE, dtype=torch.uint8)
        if data is not None and self._rank == 0:
            rest.numpy()[:] = np.frombuffer(data, np.uint8)[INLINE:]
        self._broadcast(rest)
        return first + rest.numpy().tobytes()

    def _broadcast(self, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._await("broadcast_bytes", WORLD, lambda: self._host.broadcast([buffer], options))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = self.all_gather_numbers(np.array([len(data)], np.int64))[:, 0]
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        every = self._host_gather("all_gather_bytes", padded)
        return [row[:size].tobytes() for row, size in zip(every.numpy(), sizes, strict=True)]

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._host_gather(
            "all_gather_numbers", torch.from_numpy(values)
        ).numpy()
        return found

    def _host_gather(self, operation: str, part: Tensor) -> Tensor:
        """part [N] -> [ranks, N]."""
        every = part.new_empty(self._ranks, *part.shape)
        if part.numel():
            self._await(
                operation,
                WORLD,
                lambda: self._host._allgather_base(every.view(-1), part.contiguous()),
            )
        return every

    def close(self) -> None:
        """Peers that still wait for this rank get a CollectiveError. Idempotent."""
        self._of.clear()
        self._groups.clear()
        self._host = None


class Nccl(Gloo):
    """``Collectives`` among CUDA devices; the host's own exchanges stay with gloo."""

    def _sum(self, members: Any, x: Tensor, axis: str) -> Tensor:
        self._await("all_reduce", axis, lambda: members.allreduce([x]))
        return x

    def _axis_group(self, members: tuple[int, ...]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(
                self._part(members, "nccl"), members.index(self._rank), len(members), options
            )

    def close(self) -> None:
        for members in self._groups.values():
            members.abort()
        super().close()
