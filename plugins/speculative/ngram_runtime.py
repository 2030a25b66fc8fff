"""Runtime of the speculative algorithm "ngram"."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Worker
from glowplug.core.speculation.token_drafts import TokenDrafts
from glowplug.kernels.speculation import ngram_reference
from glowplug.kernels.speculation.ngram_reference import Lookup
from glowplug.plugins.speculative.ngram import NGramOptions


class NGram(TokenDrafts):
    """The ``protocols.SpeculativeAlgorithm`` of drafts copied from the row's own text."""

    def __init__(self, options: NGramOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(plan, worker)
        self._longest = options.prompt_lookup_max
        self._shortest = options.prompt_lookup_min
        self._search = ngram_reference.ngram_branches
        if self._device.type == "cuda":
            from glowplug.kernels.speculation import ngram

            self._search = ngram.ngram_branches

    def parents(self, shape: DraftShape) -> list[int] | None:
        if not shape.is_tree:
            return None
        places = branch_places(shape)
        nodes = {place: node for node, place in enumerate(places, 1)}
        return [0, *(nodes.get((branch, depth - 1), 0) for branch, depth in places)]

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        lookup = Lookup(self._longest, self._shortest, shape.topk, shape.steps)
        branches = self._search(tokens, rows, lengths, lookup)
        if not shape.is_tree:
            return branches[:, 0]
        chosen = [branch * shape.steps + depth for branch, depth in branch_places(shape)]
        return torch.stack([branches.flatten(1)[:, place] for place in chosen], 1)


def branch_places(shape: DraftShape) -> list[tuple[int, int]]:
    """Return the branch and the offset in it of each of the W - 1 drafts of a tree.

    The best branch is whole; of the others, all first tokens come before all second ones, as many
    as the tree has room for.
    """
    best = [(0, depth) for depth in range(shape.steps)]
    others = [(branch, depth) for depth in range(shape.steps) for branch in range(1, shape.topk)]
    return (best + others)[: shape.tokens - 1]
