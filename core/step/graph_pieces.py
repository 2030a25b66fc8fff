"""Pieces of a step that run on the device alone, so that a graph runner may capture each and replay
it later.

A step's code names its pieces and is the same with and without graphs: ``DIRECT`` just runs them.
Within the model's pass, layers mark the calls that cannot be part of one (:class:`Cuts`). What a
draft does with a prompt's tokens is a pass of its own (:class:`Extension`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class Segments(Protocol):
    """How the pieces of one batch's step are run. What lies between two pieces runs on the host in
    every step.
    """

    def run(self, name: str, work: Callable[[], T]) -> T:
        """What ``work`` returns: tensors, tuples or dataclasses of them.

        Where it is replayed, ``work`` is the one that was captured under this name, and its results
        lie where they lay
        then: whatever it reads must too. It neither waits for the device nor depends on values that
        the host knows.
        """
        ...

    def part(self, name: str) -> object | None:
        """Names the piece for ``AttentionBackend.plan_step``: its slot, the same object in every
        step; None: none.
        """
        ...


class Direct:
    """Every piece as it comes."""

    def run(self, name: str, work: Callable[[], T]) -> T:
        return work()

    def part(self, name: str) -> object | None:
        return None


DIRECT = Direct()


#: rows of T tokens, each [T, ...] -> [T, width]; it may read the step that attention has planned
Cut = Callable[..., "Tensor"]


class Cuts:
    """Calls of a model's pass that depend on more than the number of tokens: lengths, pages, a plan
    of this step.

    One object a rank, which its layers call through. What lies between two cuts works on each token
    by itself, so that it may be captured for more tokens than a step has, and replayed.

    Attributes:
        taker: gets every call in place of ``work`` while a graph runner captures a pass; None:
            calls go through.
    """

    def __init__(self) -> None:
        self.taker: Callable[[Cut, tuple[Tensor, ...], int], Tensor] | None = None

    def call(self, work: Cut, rows: tuple[Tensor, ...], width: int) -> Tensor:
        """``work(*rows)``: rows [T, ...] -> [T, width] of the first one's dtype.

        The result is read before the next cut and not after it. Whatever else ``work`` reads, but
        the step's plan, is the same in every step.
        """
        return work(*rows) if self.taker is None else self.taker(work, rows, width)


#: input ids, positions and slots, int64 [F] each, and the hidden states they continue, [F, hidden]
Extend = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], None]


@dataclass(frozen=True)
class ExtendWork:
    """``extend`` keeps each of F tokens by itself and runs on the device alone, so that it may be
    captured for more of
    them: token 0 at position 0 and slot 0. ``hidden``, ``dtype``: of the states that it is given.
    """

    extend: Extend
    hidden: int
    dtype: torch.dtype


class Extension:
    """A draft's pass over the tokens of a step, prompts' above all (``Mode.DRAFT_EXTEND``), which
    may be replayed.

    One object a rank: the speculative algorithm says what the pass is, and calls it here in a step
    of no slot (``batch.segments`` is ``DIRECT``); elsewhere the pass is part of the slot's pieces.
    The call may write over what the target's pass has returned: nothing but ``hidden`` is read of
    that, and nothing after it.

    Attributes:
        work: set by the algorithm in ``reserve``; None where it has no such pass.
        taker: gets every call in place of ``work`` once a graph runner has captured it; None: calls
            go through.
    """

    def __init__(self) -> None:
        self.work: ExtendWork | None = None
        self.taker: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] | None = None

    def call(
        self, ids: Tensor, positions: Tensor, slots: Tensor, hidden: Tensor, source: Tensor
    ) -> None:
        """As ``ExtendWork.extend`` of the rows ``source`` int64 [F] of hidden [N, hidden]."""
        if self.taker is not None:
            self.taker(ids, positions, slots, hidden, source)
        else:
            assert self.work is not None, "the algorithm that calls has said what it is"
            self.work.extend(ids, positions, slots, hidden[source])
