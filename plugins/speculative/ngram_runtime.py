"""Runtime of the speculative algorithm "ngram"."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits, Worker
from glowplug.core.speculation.token_drafts import TokenDrafts
from glowplug.kernels.speculation import ngram_reference
from glowplug.kernels.speculation.ngram_reference import Lookup
from glowplug.plugins.speculative.ngram import NGramOptions


class NGram(TokenDrafts):
    """The ``protocols.SpeculativeAlgorithm`` of drafts copied from the row's own text.

    At the end of a step it is known whether a row has drafts for its next one: a row without a
    match has none. On a GPU the text is searched there, on a CPU only in steps that verify drafts,
    since the search of 32 rows takes 1 ms.
    """

    def __init__(self, options: NGramOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(plan, worker)
        self._longest = options.prompt_lookup_max
        self._shortest = options.prompt_lookup_min
        # simulated acceptance takes the drafts of all rows, whatever they are
        self.ragged = options.simulate_accept_rates is None
        self._search = ngram_reference.ngram_branches
        if self._device.type == "cuda":
            from glowplug.kernels.speculation import ngram

            self._search = ngram.ngram_branches

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        drafts = self._shape.tokens - 1
        #: drafts of the largest size, in the order of ``propose``
        self._found = torch.zeros(limits.rows, drafts, dtype=torch.int64, device=self._device)
        #: number of matches from which they were copied
        self._matches = torch.zeros(limits.rows, dtype=torch.int32, device=self._device)

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

    def foresee(self, tokens: Tensor, rows: Tensor, lengths: Tensor) -> Tensor | None:
        if self._on_host:
            if not self.ragged:
                return None
            found = ngram_reference.have_matches(tokens, rows, lengths, self._shortest)
            return torch.from_numpy(np.array(found, np.int32) * np.int32(self._shape.tokens - 1))
        self._found[rows], self._matches[rows] = self._drafts(tokens, rows, lengths, self._shape)
        return self._matches[rows].clamp(max=1) * (self._shape.tokens - 1) if self.ragged else None

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        if self._on_host or (shape.is_tree and shape != self._shape):
            drafts, matches = self._drafts(tokens, rows, lengths, shape)
        else:  # the best branch comes first, so that a chain is the beginning of it
            drafts, matches = self._found[rows, : shape.tokens - 1], self._matches[rows]
        return drafts.where(matches[:, None] > 0, ~drafts) if self.ragged else drafts

    def _drafts(
        self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape
    ) -> tuple[Tensor, Tensor]:
        """Return the drafts of rows in the order of ``parents``, and the number of their matches.

        Arguments as in ``propose``. They are int64 [n, W - 1] and int32 [n].
        """
        lookup = Lookup(self._longest, self._shortest, shape.topk, shape.steps)
        branches, matches = self._search(tokens, rows, lengths, lookup)
        best, others = branches[:, 0], branches[:, 1:].transpose(1, 2).flatten(1)
        return torch.cat([best, others], 1)[:, : shape.tokens - 1], matches
