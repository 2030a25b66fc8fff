"""Runtime of the collectives "peer_memory": small and medium tensors go through peers' memory.

NCCL, which is the base class, exchanges tensors that no buffer fits, and all tensors of GPUs that
cannot access each other's memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glowplug.core.errors import CollectiveError, GlowplugError
from glowplug.core.layers.linear import FORMAT_PLAIN, Both, both_formats
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Parts, Quantized, Worker
from glowplug.kernels.collectives.add_norm import add_rms_norm
from glowplug.kernels.collectives.exchange_tables import exchange_table
from glowplug.kernels.formats.fp8_block import FP8_INPUT
from glowplug.kernels.formats.fp8_triton import empty_quantized
from glowplug.kernels.launch.sums import add_up
from glowplug.kernels.moe.sum import moe_sum
from glowplug.plugins.collectives.peer_experts import PeerExpertRows, expert_buffer_size
from glowplug.plugins.collectives.peer_group import Alarm, PeerGroup
from glowplug.plugins.collectives.peer_memory import PeerMemoryOptions
from glowplug.plugins.collectives.peer_sizes import SumLimits, peer_sizes, sum_limits
from glowplug.plugins.collectives.torch_distributed_runtime import Nccl

logger = logging.getLogger("glowplug")


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
        self._expert_rows: dict[tuple[Any, ...], PeerExpertRows] = {}
        self._alarm = Alarm(torch.device(worker.device))
        self._limits = self._agreed_limits(options.all_reduce, plan)
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

    def _agreed_limits(self, way: str, plan: EnginePlan) -> dict[tuple[int, ...], SumLimits]:
        """Return the limits of all-reduces of each group, equal on all ranks.

        Raises:
            GlowplugError: a table has changed while the ranks read it, or their folders differ.
        """
        devices = plan.facts.hardware.devices
        card = devices[0].name if devices else ""
        found = {
            members: sum_limits(len(members), way, card, plan.dtype)
            for members in set(self._members.values())
        }
        table = exchange_table(card, self._ranks, plan.dtype).table
        read = hashlib.sha256(repr((sorted(found.values()), table)).encode()).digest()
        if len(set(self.all_gather_bytes(read))) > 1:
            raise GlowplugError(
                "ranks read different tables of measured exchanges: start again, with the same "
                "GLOWPLUG_CONFIG_DIR for all ranks"
            )
        return found

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
        tokens = plan.sizes.groups * plan.sizes.max_step_tokens
        try:
            for members in groups:
                name = f"glowplug {'-'.join(map(str, members))} {id(self._store):x}"
                self._peers[members] = PeerGroup(
                    name,
                    members.index(self._rank),
                    len(members),
                    self._part(members, "peers"),
                    peer_sizes(
                        len(members), plan.facts.model.hidden_size, tokens, self._limits[members]
                    ),
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

    def reduce_scatter_exact(self, x: Tensor, axis: str) -> Tensor:
        """Sum x [size, N, ...] over the axis, and return this rank's part, float32 [N, ...].

        Sums are in float32 and in order of rank.
        """
        peers = self._peer_of.get(axis)
        if peers is not None and x.numel():
            found = peers.reduce_scatter_exact(x.contiguous())
            if found is not None:
                return found
        return add_up(self.all_to_all(x, axis))

    def expert_rows(
        self, axis: str, hidden: int, topk: int, rows: int, dtype: str
    ) -> PeerExpertRows | None:
        """Return an exchange of tokens with the ranks of their experts.

        Equal calls return the same object.

        Args:
            axis: mesh axis of the ranks.
            hidden: hidden size.
            topk: most experts of a token.
            rows: most tokens of a rank; half as many in float32.
            dtype: dtype of the activations, by torch's name.

        Returns:
            the exchange; None if the GPUs cannot access each other's memory.
        """
        peers = self._peer_of.get(axis)
        if peers is None:
            return None
        key = (axis, hidden, topk, rows, dtype)
        if key not in self._expert_rows:
            element = getattr(torch, dtype).itemsize
            size = expert_buffer_size(hidden, topk, rows, element)
            there, back = peers.allocate([size, size])
            assert there is not None and back is not None, "a row has words"
            self._expert_rows[key] = PeerExpertRows(there, back)
        return self._expert_rows[key]

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
        self._expert_rows.clear()
        self._forget()
        super().close()
