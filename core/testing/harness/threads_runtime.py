"""Collectives over shared lists: one barrier for each group of ranks, and a copy of everything that
crosses it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from glowplug.core.errors import CollectiveError
from glowplug.core.facts.mesh import group
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.testing.harness.threads import ThreadOptions

MEETINGS: dict[str, Meeting] = {}  #: ``Worker.rendezvous`` -> where its ranks meet


class Room:
    """Where one group of ranks exchanges. Two sets of places, so that one barrier an exchange is
    enough: a rank can write into a set again only after the next exchange, which all others enter
    after they have read it.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.places: tuple[list[Any], list[Any]] = ([None] * size, [None] * size)


class Meeting:
    """The rooms of one set of ranks."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, ...], Room] = {}
        self._lock = threading.Lock()
        self.over = False

    def room(self, ranks: tuple[int, ...]) -> Room:
        with self._lock:
            if ranks not in self._rooms:
                self._rooms[ranks] = Room(len(ranks))
                if self.over:
                    self._rooms[ranks].barrier.abort()
            return self._rooms[ranks]

    def end(self) -> None:
        """Every rank that waits, or will wait, gets a CollectiveError."""
        with self._lock:
            self.over = True
            for room in self._rooms.values():
                room.barrier.abort()


class ThreadCollectives:
    """``Collectives`` of one rank. What its ranks ask for must agree, in kind and shape:
    CollectiveError if not.
    """

    def __init__(self, options: ThreadOptions, plan: EnginePlan, worker: Worker) -> None:
        self.timeout = options.timeout
        self.mesh = plan.mesh
        self.rank = worker.rank
        self.world = tuple(range(worker.ranks))
        self.meeting = MEETINGS[worker.rendezvous]
        self._turns: dict[tuple[int, ...], int] = {}

    def _exchange(self, ranks: tuple[int, ...], what: tuple[Any, ...], item: Any) -> list[Any]:
        """The items of ``ranks``, in their order. ``what`` must be equal on all of them."""
        if len(ranks) == 1:
            return [item]
        room = self.meeting.room(ranks)
        turn = self._turns.get(ranks, 0)
        self._turns[ranks] = turn + 1
        places = room.places[turn % 2]
        places[ranks.index(self.rank)] = (what, item)
        try:
            room.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise CollectiveError(
                f"rank {self.rank}: {what} among ranks {ranks}: a peer has gone or did not come "
                f"within {self.timeout:.0f} s"
            ) from None
        found = list(places)
        asked = [kind for kind, _ in found]
        if any(kind != what for kind in asked):
            raise CollectiveError(f"ranks {ranks} meet for different things: {asked}")
        return [item for _, item in found]

    def _tensors(self, name: str, x: Tensor, axis: str) -> list[Tensor]:
        """Copies of every rank's x, because owners go on to write into theirs."""
        ranks = group(axis, self.rank, self.mesh)
        if len(ranks) == 1:
            return [x]
        return self._exchange(ranks, (name, axis, tuple(x.shape), x.dtype), x.clone())

    def _place(self, axis: str) -> tuple[int, int]:
        """This rank's index along the axis, and the axis's size."""
        ranks = group(axis, self.rank, self.mesh)
        return ranks.index(self.rank), len(ranks)

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        parts = self._tensors("all_reduce", x, axis)
        return x if len(parts) == 1 else _sum(parts)

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        parts = self._tensors("all_gather", x, axis)
        return x if len(parts) == 1 else torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        place, size = self._place(axis)
        if x.shape[0] % size:
            raise CollectiveError(f"reduce_scatter of {x.shape[0]} rows over {axis} of {size}")
        rows = x.shape[0] // size
        parts = self._tensors("reduce_scatter", x, axis)
        return x if size == 1 else _sum([part[place * rows : (place + 1) * rows] for part in parts])

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        place, size = self._place(axis)
        if size > 1 and x.shape[0] != size:
            raise CollectiveError(f"all_to_all of {x.shape[0]} parts over {axis} of {size}")
        parts = self._tensors("all_to_all", x, axis)
        return x if size == 1 else torch.stack([part[place] for part in parts])

    def all_to_all_rows(self, x: Tensor, counts: Seq[int], received: Seq[int], axis: str) -> Tensor:
        ranks = group(axis, self.rank, self.mesh)
        place, size = self._place(axis)
        if not (len(counts) == len(received) == size) or sum(counts) != x.shape[0]:
            raise CollectiveError(
                f"all_to_all_rows of {x.shape[0]} rows over {axis} of {size}: {counts}, {received}"
            )
        if size == 1:
            return x
        sent = self._exchange(
            ranks,
            ("all_to_all_rows", axis, tuple(x.shape[1:]), x.dtype),
            torch.split(x.clone(), list(counts)),
        )
        mine = [parts[place] for parts in sent]
        if [len(part) for part in mine] != list(received):
            raise CollectiveError(
                f"rank {self.rank} expects {list(received)} rows, {[len(p) for p in mine]} were sent"
            )
        return torch.cat(mine)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        sent = self._exchange(self.world, ("broadcast_bytes",), data)[0]
        assert isinstance(sent, bytes), "rank 0 has nothing to broadcast"
        return sent

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._exchange(self.world, ("all_gather_bytes",), data)

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack(
            self._exchange(self.world, ("all_gather_numbers", values.shape), values.copy())
        )

    def close(self) -> None:
        return None


def _sum(parts: Seq[Tensor]) -> Tensor:
    """In rank order, so that each rank computes the same bits."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
