"""Growth of draft trees: each pass of a draft expands the most likely tokens of the last one.

A pass computes K tokens of each row, the frontier, and yields the K most likely successors of each
of them as candidates. The K candidates of a pass with the highest scores are the next frontier. In
the end the candidates of all passes with the highest scores form the tree. The score of a candidate
is the logarithm of the probability that the draft gives to its path (EAGLE-2, arXiv 2406.16858).

D is the number of decode rows, K the branches of a pass, and P the number of candidates so far.
Candidates are numbered from 1; 0 is the row's newest token. Everything stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.step.draft_tree import DraftTree


@dataclass(eq=False)
class Growth:
    """The candidates of the passes so far, and the frontier of the next pass.

    Attributes:
        root: Newest token of each row, int64 [D].
        tokens: Candidates, int64 [D, P].
        scores: Their scores, float32 [D, P]; never above that of the parent.
        parents: Numbers of their parents, int64 [D, P].
        frontier: Numbers of the candidates that the next pass computes, int64 [D, K].
        source: Index of each frontier token's parent among its row's tokens of the last pass,
            int64 [D, K].
        computed: Tokens of a row in the last pass.
        seen: Entries of the draft's cache that each frontier token attends to, int64 [D, K]: bit j
            is entry j of this round. Entry 0 belongs to the newest token.
    """

    root: Tensor
    tokens: Tensor
    scores: Tensor
    parents: Tensor
    frontier: Tensor
    source: Tensor
    seen: Tensor
    computed: int = 1

    @property
    def parent_places(self) -> Tensor:
        """Index of each frontier token's parent among all tokens of the last pass, [D * K]."""
        rows = len(self.root)
        step = self.computed
        first = torch.arange(0, rows * step, step, device=self.source.device)
        return (self.source + first[:, None]).view(-1)

    @property
    def frontier_tokens(self) -> Tensor:
        """The tokens that the next pass computes, int64 [D, K]."""
        return self.tokens.gather(1, self.frontier - 1)


def first_growth(root: Tensor, tokens: Tensor, scores: Tensor) -> Growth:
    """Return the growth after the first pass, which computed each row's newest token.

    Args:
        root: Newest token of each row, int64 [D].
        tokens: The K most likely tokens after it, int64 [D, K].
        scores: Their log-probabilities, float32 [D, K].
    """
    places = _places(tokens)
    nothing = torch.zeros_like(tokens)
    seen = nothing + (_bit(1, places) | 1)
    return Growth(root, tokens, scores, nothing, nothing + places + 1, nothing, seen)


def next_growth(growth: Growth, passes: int, tokens: Tensor, scores: Tensor) -> Growth:
    """Return the growth after a further pass.

    Args:
        growth: The growth before the pass, which computed the frontier.
        passes: Number of passes, this one included.
        tokens: The K most likely tokens after each frontier token, int64 [D * K, K].
        scores: Their log-probabilities, float32 [D * K, K].
    """
    rows = len(growth.root)
    branches = tokens.shape[1]
    known = growth.tokens.shape[1]
    before = growth.scores.gather(1, growth.frontier - 1)
    total = (before.view(-1, 1) + scores).view(rows, branches * branches)
    chosen = total.topk(branches, 1).indices
    source = chosen // branches
    seen = growth.seen.gather(1, source)
    return Growth(
        growth.root,
        torch.cat([growth.tokens, tokens.view_as(total)], 1),
        torch.cat([growth.scores, total], 1),
        torch.cat([growth.parents, growth.frontier.repeat_interleave(branches, 1)], 1),
        known + 1 + chosen,
        source,
        seen | _bit(1 + (passes - 1) * branches, _places(seen)),
        branches,
    )


def grown_tree(growth: Growth, shape: DraftShape) -> tuple[Tensor, DraftTree]:
    """Return the tokens of the verify step, int64 [D, W], and their trees.

    The drafts are the W - 1 candidates with the highest scores. Of equal scores the first candidate
    counts, so that a parent is never left out before its child.
    """
    best = growth.scores.sort(stable=True, dim=1, descending=True).indices[:, : shape.tokens - 1]
    chosen = best.sort(1).values
    tokens = torch.cat([growth.root[:, None], growth.tokens.gather(1, chosen)], 1)
    none = torch.zeros_like(growth.root[:, None])
    parents = torch.cat([none, _renumbered(growth.parents.gather(1, chosen), chosen)], 1)
    later = chosen.sub(shape.topk).div(shape.topk * shape.topk, rounding_mode="floor")
    depths = torch.cat([none, later.clamp(min=-1) + 2], 1)
    return tokens, DraftTree(parents, depths, ancestor_masks(parents, shape.steps))


def _renumbered(numbers: Tensor, chosen: Tensor) -> Tensor:
    """Return for numbers of candidates, or 0, their indices among the tokens of the verify step.

    Args:
        numbers: int64 [D, W - 1], numbers of chosen candidates or 0.
        chosen: Indices of the chosen candidates in ascending order, int64 [D, W - 1].
    """
    return torch.searchsorted(chosen, numbers.sub(1), right=True)


def ancestor_masks(parents: Tensor, depth: int) -> Tensor:
    """Return ``DraftTree.mask`` of the trees with these ``parents``, int64 [D, W].

    ``depth``: largest depth of a token.
    """
    own = _bit(0, _places(parents))
    mask = own | torch.zeros_like(parents)
    for _ in range(depth):
        mask = mask.gather(1, parents) | own
    return mask


def _places(rows: Tensor) -> Tensor:
    """Return the numbers of the columns of ``rows`` [D, N], int64 [N]."""
    return torch.arange(rows.shape[1], device=rows.device)


def _bit(first: int, places: Tensor) -> Tensor:
    """Return integers with only bit ``first + place`` set, for each of ``places``, int64."""
    return torch.ones_like(places) << (places + first)
