"""The head of a draft model: the tokens that its passes choose, of all or of a draft vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glowplug.core.protocols import SlicedVocabulary
from glowplug.plugins.speculative.shared.drafting import best_of_slices, most_likely
from glowplug.plugins.speculative.shared.frequent_tokens import FrequentTokens


class DraftHead:
    """The part of ``DraftPasses`` that turns hidden states into drafts."""

    _model: Any  #: the draft model
    _frequent: FrequentTokens | None  #: the draft vocabulary; None: the model's own
    _arrived: Tensor  #: counters of ``greedy.best`` and ``greedy.best_keys``

    def _likely(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` most likely tokens after hidden states [N, hidden].

        Returns:
            Token ids int64 [N, count], and their log-probabilities float32 [N, count].
        """
        logits = self.draft_logits(hidden)
        best = logits.topk(count, -1)
        return self.target_ids(best.indices), best.values - logits.logsumexp(-1, keepdim=True)

    def _most_likely(self, hidden: Tensor) -> Tensor:
        """Return the index in ``draft_logits`` of the most likely token, int64 [N].

        ``hidden``: hidden states of a draft pass, [N, hidden].
        """
        head = self.sliced_head()
        if head is None or head.slices is None:
            return most_likely(self.draft_logits(hidden), self._arrived)
        read = hidden if self._frequent is None else self._head_input(hidden)
        return best_of_slices(head.sliced_logits(read), head.slices, self._arrived)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens that drafts choose from, float32 [N, C].

        ``hidden``: hidden states of a draft pass, [N, hidden].
        """
        logits: Tensor
        if self._frequent is None:
            logits = self._model.logits(hidden)
        else:
            logits = self._frequent.head.forward(self._head_input(hidden))
        return logits

    def sliced_head(self) -> SlicedVocabulary | None:
        """Return the head of ``draft_logits``; None if it cannot return a rank's slice of them."""
        head = self._model if self._frequent is None else self._frequent.head
        return head if isinstance(head, SlicedVocabulary) else None

    def _head_input(self, hidden: Tensor) -> Tensor:
        """Return what the draft's head reads of hidden states; they themselves by default."""
        return hidden

    def target_ids(self, ids: Tensor) -> Tensor:
        """Return the target's ids of indices into ``draft_logits``."""
        return ids if self._frequent is None else self._frequent.head.ids[ids]
