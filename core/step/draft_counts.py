"""Counters of verified drafts, and the figures that follow from them.

A verify step of a row is a step in which the row decodes with at least one draft. It gains its
accepted drafts and one token of the target. Steps that compute prompts do not count, nor do results
of sequences that ended before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec


class DraftCounts(msgspec.Struct):
    """Counters of the steps whose drafts have one shape, since the engine's start.

    Attributes:
        steps, topk, tokens: the shape, see ``DraftShape``.
        engine_steps: steps of the engine with decoding rows.
        accepted: verify steps of rows by their number of accepted drafts: entry n counts those that
            accepted n.
        absent: verify steps of rows by place in the row: entry n counts those that had fewer than
            n + 1 drafts (``Batch.draft_counts``); [] if all had as many as the shape.
    """

    steps: int
    topk: int
    tokens: int
    engine_steps: int = 0
    accepted: list[int] = []
    absent: list[int] = []

    @property
    def shape(self) -> str:
        """The shape as ``steps/topk/tokens``."""
        return f"{self.steps}/{self.topk}/{self.tokens}"

    def plus(self, other: DraftCounts, sign: int = 1) -> DraftCounts:
        """Return the sum of both counters, or with ``sign`` -1 their difference."""
        return DraftCounts(
            self.steps,
            self.topk,
            self.tokens,
            self.engine_steps + sign * other.engine_steps,
            _plus(self.accepted, other.accepted, sign),
            _plus(self.absent, other.absent, sign),
        )


def _plus(one: list[int], other: list[int], sign: int) -> list[int]:
    """Return the sum of two lists of counters, of which the shorter one is filled with zeros."""
    return [a + sign * b for a, b in zip_longest(one, other, fillvalue=0)]


def summed(groups: Iterable[Sequence[DraftCounts]]) -> list[DraftCounts]:
    """Return the counters of all groups together, one entry per shape."""
    found: dict[str, DraftCounts] = {}
    for counts in groups:
        for one in counts:
            before = found.get(one.shape)
            found[one.shape] = one if before is None else before.plus(one)
    return list(found.values())


def since(now: Sequence[DraftCounts], before: Sequence[DraftCounts]) -> list[DraftCounts]:
    """Return what the counters gained between two snapshots."""
    earlier = {one.shape: one for one in before}
    return [one.plus(earlier[one.shape], -1) if one.shape in earlier else one for one in now]


class Acceptance:
    """The figures of some counters.

    Attributes:
        verify_steps: verify steps of rows.
        drafted: drafts verified in them; of trees, all tokens of the tree.
        accepted: drafts accepted in them.
        proposed_at: by position, verify steps whose drafts reached as deep.
        accepted_at: by position, verify steps that accepted the draft at the position.
    """

    def __init__(self, counts: Sequence[DraftCounts]) -> None:
        depth = max((one.steps for one in counts), default=0)
        self.verify_steps = 0
        self.drafted = 0
        self.proposed_at = [0] * depth
        self.accepted_at = [0] * depth
        for one in counts:
            if not one.steps:
                continue
            verified = sum(one.accepted)
            self.verify_steps += verified
            self.drafted += verified * (one.tokens - 1) - sum(one.absent)
            # which nodes of a tree are as deep is not counted
            absent = one.absent if one.topk == 1 else []
            for place in range(one.steps):
                self.proposed_at[place] += verified - (absent[place] if absent else 0)
                self.accepted_at[place] += sum(one.accepted[place + 1 :])
        self.accepted = sum(self.accepted_at)

    @property
    def length(self) -> float | None:
        """Mean tokens that a row gains in a verify step; None without one."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def rate(self) -> float | None:
        """Share of the drafts that were accepted; None without a draft."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rates(self) -> list[float]:
        """By position, the share of the verify steps as deep that accepted the draft there.

        Positions without such a step are left out.
        """
        pairs = zip(self.accepted_at, self.proposed_at, strict=True)
        return [accepted / proposed for accepted, proposed in pairs if proposed]


def rates_of_length(length: float) -> tuple[float, ...]:
    """Return the rates with which verify steps gain ``length`` tokens on average.

    Of all rates with this mean they have the smallest variance: a step gains ``length`` rounded
    down or up. SGLang (``match-expected``) and vLLM (``synthetic_acceptance_length``) draw from the
    same distribution.

    Args:
        length: accept length, at least 1.

    Raises:
        ValueError: ``length`` is below 1.
    """
    if not length >= 1:
        raise ValueError(f"an accept length is at least 1, got {length:g}")
    whole = int(length) - 1
    rest = round(length - 1 - whole, 9)
    return (*(1.0,) * whole, rest) if rest or not whole else (1.0,) * whole
