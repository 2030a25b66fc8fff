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
        """Return the parents of the tokens of a tree.

        The best branch is whole; of the others, all first tokens come before all second ones, as
        many as the tree has room for.
        """
        if not shape.is_tree:
            return None
        best = range(shape.steps)  # a token follows the one before it
        firsts = [0] * (shape.topk - 1)
        later = range(shape.steps + 1, shape.tokens)  # follow the tokens of the level before
        return [0, *best, *firsts, *later][: shape.tokens]

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        lookup = Lookup(self._longest, self._shortest, shape.topk, shape.steps)
        branches = self._search(tokens, rows, lengths, lookup)
        if not shape.is_tree:
            return branches[:, 0]
        best, others = branches[:, 0], branches[:, 1:].transpose(1, 2).flatten(1)
        return torch.cat([best, others], 1)[:, : shape.tokens - 1]
