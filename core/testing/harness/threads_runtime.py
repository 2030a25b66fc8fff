"""Collectives over shared lists, for ranks that are threads of one process.

Each group of ranks has a barrier, and tensors are copied as they cross it. Between exchanges one
rank runs at a time if its work is done within ``Meeting.turn``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from glowplug.core.errors import CollectiveError
from glowplug.core.facts.mesh import AXES, group
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.threads import COLLECTIVES

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.testing.harness.threads import ThreadOptions

MEETINGS: dict[str, Meeting] = {}  #: ``Worker.rendezvous`` -> meeting of its ranks


class ThreadGroup:
    """The shared lists of one group of ranks.

    Exchanges use two lists alternately, so that one barrier per exchange is enough. Before a rank
    writes into a list again, the exchange over the other list takes place, and every rank enters
    that exchange only after it has read the first list.
    """

    def __init__(self, size: int) -> None:
        self.places: tuple[list[Any], list[Any]] = ([None] * size, [None] * size)
        self._size = size
        self._arrived = 0  # ranks that wait for the current exchange
        self._exchanges = 0  # complete exchanges
        self._ended = False
        self._changed = threading.Condition()

    def wait(self, timeout: float) -> bool:
        """Wait for all ranks of the group and return whether they came.

        Unlike a ``threading.Barrier`` that is aborted, a group that ends lets the ranks of a
        complete exchange go on, so that all of them raise the same error.

        Args:
            timeout: seconds after which the group ends.
        """
        with self._changed:
            exchange = self._exchanges
            self._arrived += 1
            if self._arrived == self._size and not self._ended:
                self._arrived = 0
                self._exchanges += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._exchanges > exchange, timeout)
            complete = self._exchanges > exchange
            if not complete:
                self._end()
            return complete

    def end(self) -> None:
        """End the waiting of all ranks, also of those that come later."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._changed.notify_all()


class Meeting:
    """The thread groups of one set of ranks, each made on first use."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ThreadGroup] = {}
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._holder: int | None = None  # the rank that has the turn
        self.over = False

    def group(self, ranks: tuple[int, ...]) -> ThreadGroup:
        """Return the shared lists of the group ``ranks``."""
        with self._lock:
            if ranks not in self._groups:
                self._groups[ranks] = ThreadGroup(len(ranks))
                if self.over:
                    self._groups[ranks].end()
            return self._groups[ranks]

    @contextmanager
    def turn(self, rank: int, collectives: str) -> Iterator[None]:
        """Run the block while no other rank runs one, except while this rank waits in a group.

        Over other collectives than these, all ranks run at once: a rank may wait for a peer where
        it cannot pass the turn on.

        NOTE: torch gives the interpreter up in every operation. Threads that run at once compete
        for it each time, which takes more than half of their CPU time.

        Args:
            rank: the rank that runs the block.
            collectives: name of the ranks' collectives.
        """
        if collectives != COLLECTIVES:
            yield
            return
        self._take_turn(rank)
        try:
            yield
        finally:
            self._end_turn(rank)

    def wait(self, group: ThreadGroup, rank: int, timeout: float) -> bool:
        """Wait as ``rank`` for all ranks of ``group``; others may run meanwhile.

        Returns:
            False: the meeting is over, or ``timeout`` seconds have passed.
        """
        had_turn = self._end_turn(rank)
        complete = group.wait(timeout)
        if complete and had_turn:
            self._take_turn(rank)
        return complete

    def _take_turn(self, rank: int) -> None:
        self._turn.acquire()
        self._holder = rank

    def _end_turn(self, rank: int) -> bool:
        """Let another rank run and return whether this one had the turn."""
        had_turn = self._holder == rank
        if had_turn:
            self._holder = None
            self._turn.release()
        return had_turn

    def end(self) -> None:
        """End all exchanges: every rank that waits or will wait raises CollectiveError."""
        with self._lock:
            self.over = True
            for group in self._groups.values():
                group.end()


class ThreadCollectives:
    """The ``Collectives`` of one rank among threads.

    Raises:
        CollectiveError: the calls of a group's ranks differ in kind or shape.
    """

    def __init__(self, options: ThreadOptions, plan: EnginePlan, worker: Worker) -> None:
        self.timeout = options.timeout
        self.rank = worker.rank
        self._groups = {axis: group(axis, worker.rank, plan.mesh) for axis in AXES}
        self.world = tuple(range(worker.ranks))
        self.meeting = MEETINGS[worker.rendezvous]
        self._calls: dict[tuple[int, ...], int] = {}

    def _exchange(self, ranks: tuple[int, ...], what: tuple[Any, ...], item: Any) -> list[Any]:
        """Return the items of ``ranks``, in their order.

        Args:
            ranks: the group.
            what: kind of the call, which must be equal on all ranks.
            item: this rank's item.
        """
        if len(ranks) == 1:
            return [item]
        group = self.meeting.group(ranks)
        call = self._calls.get(ranks, 0)
        self._calls[ranks] = call + 1
        places = group.places[call % 2]
        places[ranks.index(self.rank)] = (what, item)
        if not self.meeting.wait(group, self.rank, self.timeout):
            raise CollectiveError(
                f"rank {self.rank}: {what} among ranks {ranks}: a peer has ended or did not answer "
                f"within {self.timeout:.0f} s"
            )
        found = list(places)
        calls = [kind for kind, _ in found]
        if any(kind != what for kind in calls):
            raise CollectiveError(f"ranks {ranks} made different calls: {calls}")
        return [item for _, item in found]

    def _tensors(self, name: str, x: Tensor, axis: str) -> list[Tensor]:
        """Return copies of every rank's x, since ranks may overwrite their own."""
        ranks = self._groups[axis]
        if len(ranks) == 1:
            return [x]
        return self._exchange(ranks, (name, axis, tuple(x.shape), x.dtype), x.clone())

    def _place(self, axis: str) -> tuple[int, int]:
        """Return this rank's index along the axis, and the axis's size."""
        ranks = self._groups[axis]
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
        ranks = self._groups[axis]
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
                f"rank {self.rank} expects {list(received)} rows, "
                f"{[len(p) for p in mine]} were sent"
            )
        return torch.cat(mine)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        sent = self._exchange(self.world, ("broadcast_bytes",), data)[0]
        assert isinstance(sent, bytes), "rank 0 has nothing to broadcast"
        return sent

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._exchange(self.world, ("all_gather_bytes",), data)

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        every = self._exchange(self.world, ("all_gather_numbers", values.shape), values.copy())
        found = np.stack(every)
        found.flags.writeable = False
        return found

    def close(self) -> None:
        return None


def _sum(parts: Seq[Tensor]) -> Tensor:
    """Return the sum in rank order, so that each rank computes the same bits."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
