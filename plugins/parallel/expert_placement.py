"""Placement of a layer's experts on ranks by their load, with further copies of loaded experts.

A slot is a place for one expert: with E experts and R redundant copies a layer has E + R slots, an
equal number on each rank. Rank r along the axis "ep" has the r-th block of slots. All functions are
deterministic, so that every rank computes the same placement. Plan zone: no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from glowplug.core.facts.expert_load import ExpertLoad


@dataclass(frozen=True)
class Placement:
    """The placement of the experts of all layers.

    Attributes:
        load: recorded load; None: all experts count as equally loaded.
        redundant: number of further copies of experts in each layer.
        ranks: number of ranks along the axis "ep".
    """

    load: ExpertLoad | None
    redundant: int
    ranks: int

    @property
    def contiguous(self) -> bool:
        """True: each rank holds one block of consecutive experts, without copies."""
        return self.ranks == 1 or (self.load is None and not self.redundant)

    def slots(self, layer: str, experts: int) -> tuple[int, ...] | None:
        """Return the expert in each slot of a layer; None if the placement is contiguous.

        Args:
            layer: module path of the layer. If it has no recorded load, its experts count as
                equally loaded.
            experts: number of routed experts of the layer.
        """
        if self.contiguous:
            return None
        counts = () if self.load is None else self.load.layers.get(layer, ())
        if len(counts) != experts:
            counts = (1,) * experts
        return place_experts(counts, self.redundant, self.ranks)


@lru_cache(maxsize=512)
def place_experts(load: tuple[int, ...], redundant: int, ranks: int) -> tuple[int, ...]:
    """Return the expert in each slot, so that ranks have nearly equal loads.

    Every expert has at least one slot, and no rank has two slots of one expert.

    Args:
        load: load of each expert.
        redundant: number of further copies; at most len(load) * (ranks - 1).
        ranks: number of ranks, which divides len(load) + redundant.
    """
    experts = len(load)
    assert (experts + redundant) % ranks == 0, "every rank has the same number of slots"
    assert redundant <= experts * (ranks - 1), "a rank has one copy of an expert at most"
    ordered = tuple(range(experts))
    copies = count_copies(load, redundant, ranks)
    packed = _Ranks(load, copies, ranks).packed()
    # NOTE: packing is a heuristic, and a load may happen to be balanced in the order of experts
    if not redundant and peak_load(load, ordered, ranks) <= peak_load(load, packed, ranks):
        return ordered
    return packed


def count_copies(load: Sequence[int], redundant: int, most: int) -> list[int]:
    """Return the number of copies of each expert.

    Each redundant copy goes to the expert with the greatest load per copy.

    Args:
        most: largest number of copies of one expert.
    """
    copies = [1] * len(load)
    waiting: list[tuple[float, int, int]] = [(-load[e], 1, e) for e in range(len(load))]
    heapq.heapify(waiting)
    for _ in range(redundant):
        _, held, expert = heapq.heappop(waiting)
        held += 1
        copies[expert] = held
        if held < most:
            heapq.heappush(waiting, (-load[expert] / held, held, expert))
    return copies


def peak_load(load: Sequence[int], slots: Sequence[int], ranks: int) -> float:
    """Return the load of the most loaded rank. An expert's load is divided among its copies."""
    return max(rank_loads(load, slots, ranks))


def rank_loads(load: Sequence[int], slots: Sequence[int], ranks: int) -> list[float]:
    """Return the load of each rank. An expert's load is divided among its copies."""
    each = len(slots) // ranks
    copies = [0] * len(load)
    for expert in slots:
        copies[expert] += 1
    return [
        sum(load[expert] / copies[expert] for expert in slots[rank * each : (rank + 1) * each])
        for rank in range(ranks)
    ]


def balancedness(layers: Iterable[tuple[Sequence[int], Sequence[int]]], ranks: int) -> float:
    """Return the mean load of a rank divided by the load of the most loaded rank, over all layers.

    1 is perfect balance; the least possible value is 1 / ranks.

    Args:
        layers: (load of each expert, expert in each slot) of each layer.
    """
    mean = 0.0
    most = 0.0
    for load, slots in layers:
        mean += sum(load) / ranks
        most += peak_load(load, slots, ranks)
    return mean / most if most else 1.0


class _Ranks:
    """Ranks that are filled with copies of experts, the most loaded copies first."""

    def __init__(self, load: Sequence[int], copies: Sequence[int], ranks: int) -> None:
        self._copies = copies
        self._share = [count / held for count, held in zip(load, copies, strict=True)]
        self._each = sum(copies) // ranks
        self._held: list[list[int]] = [[] for _ in range(ranks)]
        self._load = [0.0] * ranks

    def packed(self) -> tuple[int, ...]:
        """Place all copies and return the expert in each slot."""
        shares = self._share
        for expert in sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert)):
            for _ in range(self._copies[expert]):
                self._place(expert)
        return tuple(expert for held in self._held for expert in sorted(held))

    def _place(self, expert: int) -> None:
        """Place a copy on the least loaded rank that has a free slot and no copy of the expert."""
        free = self._with_free_slots()
        rank = min(
            (rank for rank in free if expert not in self._held[rank]), key=self._order, default=-1
        )
        if rank < 0:
            rank = self._make_room(expert, min(free, key=self._order))
        self._add(rank, expert)

    def _with_free_slots(self) -> list[int]:
        return [rank for rank, held in enumerate(self._held) if len(held) < self._each]

    def _order(self, rank: int) -> tuple[float, int, int]:
        return self._load[rank], len(self._held[rank]), rank

    def _make_room(self, expert: int, free: int) -> int:
        """Move an expert from a full rank without ``expert`` to the rank ``free``.

        NOTE: there is always such an expert. ``expert`` has fewer copies than there are ranks, so
        a full rank lacks it. That rank has more experts than ``free`` has beside ``expert``.

        Returns:
            The rank that now has a free slot.
        """
        moves = [
            (self._after(rank, free, moved, expert), rank, moved)
            for rank, held in enumerate(self._held)
            if expert not in held
            for moved in held
            if moved not in self._held[free]
        ]
        _, rank, moved = min(moves)
        self._held[rank].remove(moved)
        self._load[rank] -= self._share[moved]
        self._add(free, moved)
        return rank

    def _after(self, rank: int, free: int, moved: int, added: int) -> float:
        """Return the larger load of two ranks after ``moved`` moved and ``added`` was added."""
        share = self._share
        return max(self._load[free] + share[moved], self._load[rank] - share[moved] + share[added])

    def _add(self, rank: int, expert: int) -> None:
        self._held[rank].append(expert)
        self._load[rank] += self._share[expert]
