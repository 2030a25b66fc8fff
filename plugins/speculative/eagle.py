"""EAGLE: drafts by a head trained for the target.

The output is, token for token, the same as without speculation. Sources: EAGLE-2, arXiv 2406.16858;
EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from glowplug.core.facts.model_folder import embedded_path
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.core.plugin.options import SpeculativeOptions
from glowplug.plugins.speculative.nextn import check_options

SHIPPED = "eagle3"  #: folder of the embedded model's head, beside its checkpoint


class EagleOptions(SpeculativeOptions):
    use: Literal["eagle"] = "eagle"
    steps: int = Field(3, description="tokens drafted after each step; each takes one pass of the head")
    topk: int = Field(1, description="x")
    draft_tokens: int | None = Field(None, description="tokens verified per step; None: steps + 1")
    draft_model: str | None = Field(
        None, description="folder of the head; None: the one shipped with the embedded model"
    )

    def width(self) -> int:
        return self.lookahead() + 1

    def lookahead(self) -> int:
        return max(self.steps, 1)

    def draft_folder(self) -> str | None:
        return self.draft_model

    def draft_for(self, model: str) -> str | None:
        if self.draft_model is None and model == str(embedded_path()):
            return str(embedded_path().parent / SHIPPED)
        return self.draft_model


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="eagle",
            options=EagleOptions,
            factory="glowplug.plugins.speculative.eagle_runtime:Eagle",
            check=check_options,
            offers=SpeculativeOffers(
                drafts=True, eagle_head=True, first_key=True, modes=EVERY_MODE_GRAPH
            ),
            summary="drafts by an EAGLE head trained for the model; the same tokens in fewer steps",
        )
    ]
