"""Runtime of the collectives "gloo" and "nccl".

There is one process group of torch.distributed for each set of ranks that an axis connects. The
groups are built directly over a store. There is no default group and no global state, so ranks may
be processes or threads of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.errors import CollectiveError
from glowplug.core.facts.mesh import AXES, axis_size, group
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.kernels.launch.sums import add_up
from glowplug.plugins.collectives.gloo_links import WORLD, GlooLinks
from glowplug.plugins.collectives.local_links import LocalLinks
from glowplug.plugins.collectives.rendezvous import (
    await_ranks,
    bind_nccl,
    open_store,
    own_address,
)
from glowplug.plugins.collectives.torch_distributed import TorchDistributedOptions

#: most elements of a tensor for which all-reduce gathers every rank's tensor and sums locally
GATHERED_NUMBERS_MAX = 1 << 13


class Gloo:
    """The ``Collectives`` between CPUs. Every rank must call the same methods in the same order.

    Args:
        options: The component's options.
        plan: The plan, with the mesh.
        worker: The rank.
        store: Store to use instead of the one at ``worker.rendezvous``; None: use that one.
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
        self._members: dict[str, tuple[int, ...]] = {}  # axis -> ranks, for axes of several ranks
        self._store = store or open_store(
            worker.rendezvous, worker.rank, worker.ranks, options.timeout
        )
        await_ranks(self._store, worker.rank, worker.ranks, options.timeout, "start")
        self._links = self._connect_hosts(plan.hosts, options.timeout)
        self._connect_axes(plan.mesh)
        # NOTE: without this wait, a rank that fails and exits while other ranks still connect to it
        # would make their connections fail, and they would report this instead.
        await_ranks(self._store, worker.rank, worker.ranks, options.timeout, "connect")

    def _connect_axes(self, mesh: Mapping[str, int]) -> None:
        """Connect this rank with the others of each axis."""
        for axis in AXES:
            if axis_size(axis, mesh) > 1:
                self._members[axis] = group(axis, self._rank, mesh)
                self._of[axis] = self._shared(axis, self._members[axis])

    def _connect_hosts(self, hosts: int, timeout: float) -> LocalLinks | GlooLinks:
        """Return the connections for host data: sockets on one host, gloo between several."""
        if hosts == 1:
            return LocalLinks(self._rank, self._ranks, self._store, timeout)
        every = tuple(range(self._ranks))
        group = self._call("connecting", WORLD, lambda: self._host_group(every, WORLD))
        return GlooLinks(group, self._rank, self._ranks, self._await)

    def _shared(self, axis: str, members: tuple[int, ...]) -> Any:
        """Return the process group for ``axis``; axes that connect the same ranks share one group.

        ``members``: the ranks that the axis connects.
        """
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
        """Return a store for one process group: the rendezvous store with a prefix before all keys.

        The prefix consists of ``name`` and the ranks ``members``.
        """
        return dist.PrefixStore(f"{name} {'-'.join(map(str, members))}", self._store)

    def _network(self) -> Any:
        if self._interface:
            return dist.ProcessGroupGloo.create_device(interface=self._interface)
        return dist.ProcessGroupGloo.create_device(hostname=own_address(self._rendezvous))

    def _call(self, operation: str, axis: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` and return its result; turn its errors into a CollectiveError.

        ``operation`` and ``axis`` are named in the error.
        """
        try:
            return work()
        except (RuntimeError, OSError) as error:
            raise CollectiveError(
                f"{operation} over {axis} failed on rank {self._rank} of {self._ranks}: {error}"
            ) from error

    def _await(self, operation: str, axis: str, start: Callable[[], Any]) -> None:
        """Call ``start``, which starts an asynchronous operation, and wait for its end."""
        self._call(operation, axis, lambda: start().wait())

    def meet(self, what: str) -> None:
        """Wait until every rank has called this method with the same ``what``, such as "load".

        The wait has no limit, because ranks may take long to load. The executor ends ranks that
        make no progress, and kills those that wait for a rank that has ended.
        """
        await_ranks(self._store, self._rank, self._ranks, math.inf, what, self._links.ended)

    # ---- along an axis, on the device ------------------------------------------------------------

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        members = self._of.get(axis)
        if members is None or not x.numel():
            return x
        return self._sum(members, x.contiguous(), axis)

    def _sum(self, members: Any, x: Tensor, axis: str) -> Tensor:
        """All-reduce contiguous x over the process group ``members``.

        NOTE: gloo's ring sums in an order that depends on an element's position in x, so with three
        or more ranks a token's bits would depend on the other tokens in x. Here every element is
        summed in float32 and in order of rank.
        """
        ranks = members.size()
        if ranks <= 2:  # two terms have only one order
            self._await("all_reduce", axis, lambda: members.allreduce([x]))
            return x
        if x.numel() <= GATHERED_NUMBERS_MAX:
            return add_up(self._gathered(members, x, "all_reduce", axis)).to(x.dtype)
        slices = F.pad(x.view(-1), (0, -x.numel() % ranks)).view(ranks, -1)
        own = add_up(self._exchanged(members, slices, "all_reduce", axis)).to(x.dtype)
        return self._gathered(members, own, "all_reduce", axis).view(-1)[: x.numel()].view(x.shape)

    def _gathered(self, members: Any, part: Tensor, operation: str, axis: str) -> Tensor:
        """All-gather contiguous part [...] over the process group ``members`` to [ranks, ...]."""
        every = part.new_empty(members.size(), *part.shape)
        if part.numel():
            self._await(
                operation, axis, lambda: members._allgather_base(every.view(-1), part.view(-1))
            )
        return every

    def _exchanged(self, members: Any, sent: Tensor, operation: str, axis: str) -> Tensor:
        """Send row i of ``sent`` to rank i of the process group ``members``, by all-to-all.

        ``sent`` [ranks, ...] is contiguous.

        Returns:
            [ranks, ...]: row i is the row that rank i has sent to this rank.
        """
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

    # ---- over all ranks, on the host -------------------------------------------------------------

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return self._links.broadcast(data)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._links.gather(data)

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._links.gather_numbers(values)

    def close(self) -> None:
        """Release the process groups. Idempotent.

        Peers that still wait for this rank get a CollectiveError.
        """
        self._of.clear()
        self._groups.clear()
        self._links.close()


class Nccl(Gloo):
    """``Collectives`` between CUDA devices over NCCL; host data goes as with ``Gloo``."""

    def _connect_axes(self, mesh: Mapping[str, int]) -> None:
        if isinstance(self._links, GlooLinks):
            bind_nccl(self._interface, self._rendezvous)
        super()._connect_axes(mesh)

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
