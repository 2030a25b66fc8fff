"""Runtime of the speculative algorithm "ngram"."""

from __future__ import annotations

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
        super().__init__(options.shape(), plan, worker)
        self._longest = options.prompt_lookup_max
        self._shortest = options.prompt_lookup_min
        self._search = ngram_reference.ngram_branches
        if self._device.type == "cuda":
            from glowplug.kernels.speculation import ngram

            self._search = ngram.ngram_branches

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        lookup = Lookup(self._longest, self._shortest, 1, shape.steps)
        return self._search(tokens, rows, lengths, lookup)[:, 0]
