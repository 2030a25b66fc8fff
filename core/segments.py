"""Pieces of a step that run on the device alone, so that a graph runner may capture each and replay it later.

A step's code names its pieces and is the same with and without graphs: ``DIRECT`` just runs them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

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
