"""Pieces of a step that run on the device alone, so that a graph runner may capture each and replay it later.

A step's code names its pieces and is the same with and without graphs: ``DIRECT`` just runs them. Within the model's
pass, layers mark the calls that cannot be part of one (:class:`Cuts`).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Segments(Protocol):
    """How the pieces of one batch's step are run. What lies between two pieces runs on the host in every step."""

    def run(self, name: str, work: Callable[[], T]) -> T:
        """What ``work`` returns: tensors, tuples or dataclasses of them.

        Where it is replayed, ``work`` is the one that was captured under this name, and its results lie where they lay
        then: whatever it reads must too. It neither waits for the device nor depends on values that the host knows.
        """
        ...

    def part(self, name: str) -> object | None:
        """Names the piece for ``AttentionBackend.plan_step``: its slot, the same object in every step; None: none."""
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
    """Calls of a model's pass that depend on more than the number of tokens: lengths, pages, a plan of this step.

    One object a rank, which its layers call through. What lies between two cuts works on each token by itself, so that
    it may be captured for more tokens than a step has, and replayed.

    Attributes:
        taker: gets every call in place of ``work`` while a graph runner captures a pass; None: calls go through.
    """

    def __init__(self) -> None:
        self.taker: Callable[[Cut, tuple[Tensor, ...], int], Tensor] | None = None

    def call(self, work: Cut, rows: tuple[Tensor, ...], width: int) -> Tensor:
        """``work(*rows)``: rows [T, ...] -> [T, width] of the first one's dtype.

        The result is read before the next cut and not after it. Whatever else ``work`` reads, but the step's plan, is
        the same in every step.
        """
        return work(*rows) if self.taker is None else self.taker(work, rows, width)
