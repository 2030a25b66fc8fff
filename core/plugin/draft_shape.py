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


#: the size of the drafts of a step without drafts
NO_DRAFTS = DraftShape(0, 1, 1)


def shorter_shapes(full: DraftShape) -> tuple[DraftShape, ...]:
    """Return the sizes among which the steps of an engine may choose, up to ``full``.

    They are none, one pass, half of the passes and all of them, in ascending order of tokens. No
    two have the same number of tokens.
    """
    found = [NO_DRAFTS]
    for steps in sorted({1, full.steps // 2} - {0}):
        drafts = -(-(full.tokens - 1) * steps // full.steps) if full.steps else 0
        candidates = full.topk + (steps - 1) * full.topk**2
        tokens = 1 + min(drafts, candidates)
        if steps < full.steps and found[-1].tokens < tokens < full.tokens:
            found.append(DraftShape(steps, full.topk, tokens))
    return (*found, full) if full.tokens > 1 else (full,)
