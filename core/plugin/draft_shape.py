"""The size of the drafts of a decoding row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftShape:
    """The size of the drafts that one round makes for a row.

    Attributes:
        steps: Passes of the draft, which is the depth of the tree; 0: nothing is drafted.
        topk: Branches of a pass; 1: the drafts form a chain.
        tokens: Tokens that a row computes in the verify step: its newest token and the drafts.
    """

    steps: int
    topk: int = 1
    tokens: int = 1

    @property
    def is_tree(self) -> bool:
        return self.topk > 1
