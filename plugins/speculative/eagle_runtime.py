"""Runtime of the speculative algorithm "eagle"."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glowplug.core.protocols import Model, ModelFamily, Sampler
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Accepted, Batch
from glowplug.plugins.speculative.shared.model_drafts import ModelDrafts


class Eagle(ModelDrafts):
    """The ``protocols.SpeculativeAlgorithm`` of drafts by an EAGLE head.

    An EAGLE-3 head reduces features of several layers of the target to one state of a token. This
    is done as soon as the target has computed them, so that rows and pages keep the state alone.
    """

    def build_draft(self, context: BuildContext, family: ModelFamily, target: Model) -> Any:
        return family.build_eagle(context, target)

    def _accepted(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        return super()._accepted(logits, self._model.states(hidden), batch, sampler)

    def _head_input(self, hidden: Tensor) -> Tensor:
        read: Tensor = self._model.head_input(hidden)
        return read

    def target_ids(self, ids: Tensor) -> Tensor:
        known: Tensor | None = self._model.target_ids
        found = super().target_ids(ids)
        return found if known is None else known[found]
