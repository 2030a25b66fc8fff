"""Runtime of the speculative algorithm "nextn"."""

from __future__ import annotations

from typing import Any

from glowplug.core.protocols import Model, ModelFamily
from glowplug.core.protocols.build_context import BuildContext
from glowplug.plugins.speculative.shared.model_drafts import ModelDrafts


class NextN(ModelDrafts):
    """The ``protocols.SpeculativeAlgorithm`` of drafts by the checkpoint's NextN layer."""

    def build_draft(self, context: BuildContext, family: ModelFamily, target: Model) -> Any:
        return family.build_nextn(context, target)
