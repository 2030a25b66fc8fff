"""Ranks: shares of a layer, exchanges of experts' tokens, groups of requests, and collectives."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.batch import Batch, StepShape
from glowplug.core.step.request import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A rank's part of a dimension: elements ``start`` to ``start + size`` of ``full``.

    ``reduce``: the layer's output is a partial sum that must be all-reduced. ``gather``: it is a
    slice to be gathered.
    ``axis``: the mesh axis to do either over (``core/facts/mesh.py`` names them). ``parts``: ranks
    that share the dimension;
    a part that is to be gathered is filled up to ceil(full / parts) first.
    """

    start: int
    size: int
    full: int
    reduce: bool = False
    gather: bool = False
    axis: str = "tp"
    parts: int = 1


class ExpertExchange(Protocol):
    """Moves one layer's tokens to the ranks of their experts and back. Each step calls each method
    once, in turn.

    Attributes:
        load: int64 [experts], on the device: how many tokens chose each expert so far. Over the
            ranks of a group every token is counted once, padding never. None: nobody counts.
    """

    load: Tensor | None

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's attention tokens x [T, hidden], ids int64 and weights float32 [T, K] -> the
        same of the M tokens that this rank's experts work on; ids are local expert numbers, -1
        where the expert is elsewhere.
        """
        ...

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        """This rank's (partial) results y [M, hidden] -> the complete results [T, hidden] of its
        attention tokens.

        ``partial`` [T, hidden] is this rank's term of a sum over "attn_tp" (the shared expert's),
        added to the result. Both may be overwritten.
        """
        ...


class RequestRouter(Protocol):
    """Which group of ranks runs a request. Ranks of a group share a scheduler's decisions and hold
    the same pages.

    Attributes:
        group: number of this rank's group.
        leads: this rank reports its group's outputs to the front.
    """

    group: int
    leads: bool

    def owns(self, sequence: Sequence) -> bool:
        """Does this rank's group run ``sequence``? Asked on every rank, in the same order, once for
        each Submit.

        Every rank must come to the same assignment, so it may use only what all ranks know
        (``agree``'s loads).
        """
        ...


class ParallelStrategy(Protocol):
    """One way to share the work among ranks. Several are composed by
    ``core/protocols/parallel_stack.py``.
    """

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        """This rank's part of dimension ``full`` of layer ``name``; None: what the strategies
        before this one say.

        ``role``: "column" (outputs), "row" (inputs), "vocab", "heads", "experts", "expert_width",
        "replicated".
        ``block``: the dimension splits only at multiples of it (128 for block FP8).
        """
        ...

    def agree(self, local: StepShape) -> StepShape:
        """The one host collective a step; identity unless ranks may differ. A rank without work
        says IDLE.
        """
        ...

    def router(self) -> RequestRouter | None:
        """Deals requests among groups of ranks, the same object each call. None: all run all, and
        rank 0 answers.
        """
        ...

    def enter_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """After an MLP: x [T', hidden], the tokens MLPs work on -> [T, hidden], this rank's
        attention tokens.
        """
        ...

    def leave_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Before an MLP, already normed: this rank's attention tokens -> the tokens MLPs work on."""
        ...

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        """The exchange of the mixture ``name`` of ``experts`` experts; None: its tokens need not
        move.

        With one, the layer gets this rank's own attention tokens, and its shared expert's "column"
        and "row" are split over "attn_tp" at most.
        """
        ...


class Collectives(Protocol):
    """Collectives over one mesh axis: among the ranks that differ only in it. Identity for an axis
    of size one.

    A peer that has gone or does not answer within ``collectives.timeout`` is a ``CollectiveError``.
    """

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        """The sum over the axis, bitwise the same on each of its ranks. May be computed in place.

        On the CPU a row's bits do not depend on the rows around it.
        """
        ...

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        """Equal shapes from every rank of the axis, side by side along ``dim`` in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """x [size * N, ...] -> this rank's N rows of the sum."""
        ...

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        """x [size, N, ...]: part i goes to rank i of the axis; returned part i came from rank i."""
        ...

    def all_to_all_rows(self, x: Tensor, counts: Seq[int], received: Seq[int], axis: str) -> Tensor:
        """x [sum(counts), ...]: the next counts[i] rows go to rank i; returns [sum(received), ...]
        likewise.

        Row counts are the host's, so this is never captured.
        """
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank (host side)."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes on every rank, by rank (host side; for rare things)."""
        ...

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """values int64 [N] -> [ranks, N] on every rank (host side, one small collective: ``agree``
        uses it).
        """
        ...

    def close(self) -> None: ...
