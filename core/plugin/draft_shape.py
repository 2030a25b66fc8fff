"""The size of the drafts of a decoding row."""

from __future__ import annotations

from dataclasses import dataclass

MASK_BITS = 64  #: keys of a row that one tree mask can name


@dataclass(frozen=True)
class DraftShape:
    """The size of the drafts that one round makes for a row.

    Attributes:
        steps: Passes of the draft, which is the depth of the tree; 0: nothing is drafted.
        topk: Tokens that a pass expands and branches of each; 1: the drafts form a chain.
        tokens: Tokens that a row computes in the verify step: its newest token and the drafts.
    """

    steps: int = 0
    topk: int = 1
    tokens: int = 1

    @staticmethod
    def chain(steps: int) -> DraftShape:
        """Return the shape of a chain of ``steps`` drafts."""
        return DraftShape(steps, 1, steps + 1)

    @property
    def is_tree(self) -> bool:
        return self.topk > 1

    @property
    def entries(self) -> int:
        """Number of entries that the passes of a round write to a row's draft cache.

        The first pass computes the row's newest token, each further pass ``topk`` drafts.
        """
        return 1 + (self.steps - 1) * self.topk if self.steps else 0

    @property
    def candidates(self) -> int:
        """Number of drafts that a round considers; the verify step takes the most likely ones."""
        if not self.is_tree:
            return self.steps
        return self.topk + (self.steps - 1) * self.topk * self.topk

    @property
    def lookahead(self) -> int:
        """Number of positions behind a step's own tokens that the draft writes to.

        One of them is for the token after a chunk of a prompt, whose entry continues the chunk's
        last hidden state.
        """
        return max(1, self.entries - self.tokens) if self.steps else 0

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.tokens}"


#: the size of the drafts of a step without drafts
NO_DRAFTS = DraftShape()


def shorter_shapes(full: DraftShape) -> tuple[DraftShape, ...]:
    """Return the sizes among which the steps of an engine may choose, up to ``full``.

    Up to a chain they are none, one pass, half of the passes and all of them. Up to a tree they are
    none, chains of one and of all passes, and the tree: a chain is faster where verifying the other
    branches takes more time than they gain (H200, NextN of the embedded model at one request: 1.58
    times as fast as none with three drafts, 1.29 times with a tree of seven). They ascend by
    tokens, no two with the same number, since each takes captured graphs of its own.
    """
    if full.tokens == 1:
        return (full,)
    passes = {1, full.steps} if full.is_tree else {1, full.steps // 2} - {0}
    chains = (DraftShape.chain(steps) for steps in sorted(passes))
    return (NO_DRAFTS, *(chain for chain in chains if chain.tokens < full.tokens), full)
