"""What parts of a layer hold while a step runs on a device, in bytes. No torch.

Components declare theirs as functions of a step's numbers, kept next to the code that allocates
(``AttentionOffers.work``, ``QuantizationOffers.experts_work``); ``layer_bytes`` adds up who holds
what at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: token counts divisible by this are common, since prompts often have round lengths; libraries
#: compile kernels for each, so warm-up runs them
ROUND_TOKENS = 512

SHOWN = 4  #: bytes of a float32 number, or of an int32 one


@dataclass(frozen=True)
class Work:
    """``most``: held at once, at most, beside what it was given; ``left``: of that, its results.

    ``extra``: what torch's allocator has to add for large blocks that cannot take the place of
    earlier ones, in segments that do not grow.
    """

    most: int
    left: int
    extra: int = 0


@dataclass(frozen=True)
class AttentionStep:
    """A prefill step in one layer of attention on a rank.

    Attributes:
        tokens: of the step; ``longest`` of one row, behind ``cached`` tokens that lie in the cache.
        heads, all_heads: of this rank, and of all.
        key, value: numbers of a head's query (or key) and of its value.
        entry: numbers of a token's cache entry, where all heads share one; 0: heads have entries of
            their own.
        element: bytes of a number.
    """

    tokens: int
    longest: int
    cached: int
    heads: int
    all_heads: int
    key: int
    value: int
    entry: int
    element: int


@dataclass(frozen=True)
class DecodingRows:
    """The most that decoding rows of a step may come to on a rank.

    Attributes:
        rows: those of the sequence table and one behind them, of at most ``positions`` positions
            each.
        page_size: tokens a page.
        width: tokens of a row.
        heads: of this rank.
        drafts: passes go before the step whose cache has no entry for the first position
            (``Batch.first_key``).
    """

    rows: int
    positions: int
    page_size: int
    width: int
    heads: int
    drafts: bool

    @property
    def columns(self) -> int:
        """Pages of a row."""
        return -(-self.positions // self.page_size)


@dataclass(frozen=True)
class ExpertsStep:
    """Routed experts of one layer on a rank.

    Attributes:
        tokens: that are routed, to ``chosen`` experts each of the ``count`` held; the ``shared``
            last ones of both are the shared expert.
        hidden, inter: sizes of an expert.
        element: bytes of a number of activations.
        parts: rows may stay as they are, for the next norm to add up.
        options: of the scheme.
        packages: installed distributions.
        dtype: of activations, as torch names it.
        card: its name, as the driver has it; "": none; ``compute``: what it can, 90 for Hopper.
    """

    tokens: int
    chosen: int
    count: int
    shared: int
    hidden: int
    inter: int
    element: int
    parts: bool
    options: Any
    packages: Mapping[str, str]
    dtype: str = ""
    card: str = ""
    compute: int = 0

    @property
    def pairs(self) -> int:
        return self.tokens * self.chosen

    @property
    def rows_bytes(self) -> int:
        """A result for each expert of each token."""
        return self.pairs * self.hidden * self.element

    def summed(self, most: int, beside: int) -> Work:
        """Of kernels that hold ``most``, and whose last one writes a row for each pair, with
        ``beside`` held then.
        """
        out = self.tokens * self.hidden * self.element
        if self.parts:
            return Work(max(most, self.rows_bytes + beside), self.rows_bytes)
        return Work(max(most, self.rows_bytes + beside, self.rows_bytes + out), out)


def tiled_rows(pairs: int, experts: int, tile: int) -> int:
    """Rows of ``pairs`` in order of experts, each of which is filled up to whole tiles: the most
    there can be.
    """
    return min(pairs, (pairs + experts * (tile - 1)) // tile) * tile


def gated_rows(step: ExpertsStep) -> Work:
    """Two products in the compute dtype around a gate that is part of the first: inner rows, then
    outer ones.
    """
    inner = step.pairs * step.inter * step.element
    return step.summed(0, inner)
