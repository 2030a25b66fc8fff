"""Copies on the device in place of the exchanges between ranks, for one rank that runs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import GlowplugError
from glowplug.core.startup.lone_rank import LoneRank
from glowplug.entrypoints.bench.ranks.exchange_times import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
)

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols import Parts

ALL_TO_ALL = "all_to_all"
BROADCAST = "broadcast"  #: of bytes on the host
HOST_GATHER = "gather"  #: of bytes or numbers on the host
#: axis of exchanges of host data, in which all ranks take part
HOST = "host"
#: optional methods of collectives that the copies have if the plan's collectives have them
OPTIONAL = ("reduced_norm", "reduce_scatter_exact")


@dataclass(frozen=True)
class ReplacedExchange:
    """An exchange that a copy replaces.

    Attributes:
        operation: name of the operation.
        axis: mesh axis, or "host" for data in host memory.
        ranks: number of ranks that would take part.
        bytes: bytes of the whole tensor.
        tokens: tokens of each rank, for an expert exchange; 0 for tensors.
        part_of: the larger exchange that this one is a part of; "": none.
    """

    operation: str
    axis: str
    ranks: int
    bytes: int
    tokens: int = 0
    part_of: str = ""


class ExchangeLog:
    """The number of exchanges of each kind in the turns of a rank's loop.

    Calls of a captured step are made once, while it is captured. So the turns of eager steps alone
    have all exchanges.

    Attributes:
        uneven: True: rows were exchanged whose number depends on the tokens' choice of experts.
    """

    uneven = False

    def __init__(self) -> None:
        self._turn: Counter[ReplacedExchange] = Counter()
        self._kept: list[Counter[ReplacedExchange]] | None = None
        self._part_of = ""

    def add(self, operation: str, axis: str, ranks: int, size: int, tokens: int = 0) -> None:
        """Count one exchange of the current turn; the arguments are ``ReplacedExchange``'s."""
        self._turn[ReplacedExchange(operation, axis, ranks, size, tokens, self._part_of)] += 1

    @contextmanager
    def part_of(self, name: str) -> Iterator[None]:
        """Count the exchanges made in this context as parts of the exchange ``name``."""
        self._part_of = name
        try:
            yield
        finally:
            self._part_of = ""

    def begin_turn(self) -> None:
        """Begin a turn; the counts of the one before are kept between ``keep`` and ``take``."""
        if self._kept is not None:
            self._kept.append(self._turn)
        self._turn = Counter()

    def keep(self) -> None:
        """Keep the counts of all turns from now on."""
        self._kept = []

    def take(self) -> list[list[dict[str, Any]]]:
        """Return the kept turns and keep no more: the exchanges of each, with their "count"."""
        kept = self._kept or []
        self._kept = None
        return [[asdict(one) | {"count": count} for one, count in turn.items()] for turn in kept]


class LoneRankCopies(LoneRank):
    """``Collectives`` of a single rank, which copy on the device what ranks would exchange.

    Every other rank seems to send this rank's data. Each call moves the bytes of the whole tensor
    once, by kernels that can be captured, and waits for nothing.

    Args:
        mesh: mesh axis -> size.
        rank: number of the rank.
        optional: those of ``OPTIONAL`` that the collectives have.

    Attributes:
        log: counts of the calls.
    """

    def __init__(
        self, mesh: Mapping[str, int], rank: int, optional: Collection[str] = OPTIONAL
    ) -> None:
        super().__init__(mesh, rank)
        self.log = ExchangeLog()
        for name in optional:
            setattr(self, name, getattr(self, f"_{name}"))

    def _exchanges(self, operation: str, x: Tensor, axis: str, parts: int = 1) -> bool:
        """Count an exchange, and return whether the axis has several ranks.

        Args:
            operation: name of the operation.
            x: this rank's tensor.
            axis: mesh axis.
            parts: number of such tensors in the whole tensor.
        """
        ranks = self._size(axis)
        if ranks == 1 or not x.numel():
            return False
        self.log.add(operation, axis, ranks, parts * x.numel() * x.element_size())
        return True

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return x.clone() if self._exchanges(ALL_REDUCE, x, axis) else x

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        self._exchanges(ALL_GATHER, x, axis, self._size(axis))
        return x if self._size(axis) == 1 else super().all_gather(x, axis, dim)

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        if self._size(axis) == 1:
            return x
        self._exchanges(REDUCE_SCATTER, x, axis)
        own: Tensor = x.clone().chunk(self._size(axis))[self._at[axis]]
        return own

    def _reduce_scatter_exact(self, x: Tensor, axis: str) -> Tensor:
        """Return the sum of x [size, N, ...] over its parts, float32 [N, ...].

        A rank of several reads as many bytes to sum the parts that it has received.
        """
        import torch

        self._exchanges(REDUCE_SCATTER, x, axis)
        return x.sum(0, dtype=torch.float32)

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        if self._size(axis) == 1:
            return x
        self._exchanges(ALL_TO_ALL, x, axis)
        return super().all_to_all(x, axis)

    def all_to_all_rows(
        self, x: Tensor, counts: Sequence[int], received: Sequence[int], axis: str
    ) -> Tensor:
        if self._size(axis) == 1:
            return x
        self._exchanges(ALL_TO_ALL, x, axis)
        self.log.uneven = True
        return _rows(x, sum(received))

    def expert_rows(self, *given: object) -> None:
        """Refuse the exchange of experts' tokens through peers' memory, which has no copy yet.

        Raises:
            GlowplugError: always.
        """
        raise GlowplugError(
            "a rank alone replaces collectives by copies, and an exchange of experts' tokens "
            "through peers' memory has no such copy\n    fix: leave the exchange out or choose "
            "all_gather"
        )

    def _reduced_norm(self, input_format: str, add_norm: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds a residual to this rank's terms, norms and copies the sum."""

        def reduce(
            terms: Parts | Tensor, axis: str, residual: Tensor, weight: Tensor, eps: float
        ) -> tuple[Any, Tensor]:
            normed, total = add_norm(terms, residual, weight, eps)
            return normed, self.all_reduce(total, axis)

        return reduce

    # ---- host data -------------------------------------------------------------------------------

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        self.log.begin_turn()  # a turn of the loop begins with a broadcast
        self.log.add(BROADCAST, HOST, self._size("tp"), len(data or b""))
        return super().broadcast_bytes(data)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.log.add(HOST_GATHER, HOST, self._size("tp"), len(data) * self._size("tp"))
        return super().all_gather_bytes(data)

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        self.log.add(HOST_GATHER, HOST, self._size("tp"), values.nbytes * self._size("tp"))
        return super().all_gather_numbers(values)


def _rows(x: Tensor, count: int) -> Tensor:
    """Return ``count`` rows, those of x over and over; zeros if it has none."""
    import torch

    if not len(x):
        return x.new_zeros(count, *x.shape[1:])
    return x[torch.arange(count, device=x.device) % len(x)]
