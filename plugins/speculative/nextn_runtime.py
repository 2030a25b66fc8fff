"""Runtime of the speculative algorithm "nextn"."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.layers.embedding import LmHead
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    Limits,
    Model,
    ModelFamily,
    Sampler,
    SlicedVocabulary,
    Worker,
)
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Accepted, Batch
from glowplug.plugins.speculative.frequent_tokens import FrequentTokens
from glowplug.plugins.speculative.nextn import NextNOptions
from glowplug.plugins.speculative.shared.model_drafts import ModelDrafts


class NextN(ModelDrafts):
    """The ``protocols.SpeculativeAlgorithm`` of drafts by the checkpoint's NextN layer."""

    passes_rows = True

    def __init__(self, options: NextNOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._vocabulary = options.draft_vocabulary
        self._leads = worker.rank == 0
        self._frequent: FrequentTokens | None = None

    def build_draft(self, context: BuildContext, family: ModelFamily, target: Model) -> Any:
        self._collectives = context.collectives
        draft: Any = family.build_nextn(context, target)
        if self._vocabulary is not None and not isinstance(getattr(draft, "head", None), LmHead):
            raise GlowplugError(
                f"speculative.draft_vocabulary needs a NextN layer with a head of core's; "
                f"{type(draft).__name__} has none. Leave the option out"
            )
        return draft

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        if self._vocabulary is not None:
            self._frequent = FrequentTokens(
                self._model.head,
                self._vocabulary,
                self._collectives,
                self._leads,
                limits.rows - 1,
            )

    def draft(self, batch: Batch) -> Tensor:
        if self._frequent is not None:
            self._frequent.step()
        return super().draft(batch)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        if self._frequent is None:
            return super().draft_logits(hidden)
        return self._frequent.head.forward(hidden)

    def sliced_head(self) -> SlicedVocabulary | None:
        return super().sliced_head() if self._frequent is None else self._frequent.head

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids if self._frequent is None else self._frequent.head.ids[ids]

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        accepted = super().accept(logits, hidden, batch, sampler)
        if self._frequent is not None:
            self._frequent.count(batch, accepted)
        return accepted
