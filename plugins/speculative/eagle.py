"""EAGLE: drafts by a head trained for the target.

A chain or tree of ``steps`` tokens is drafted after each step and verified by the next one. The
output is, token for token, the same as without speculation. Sources: EAGLE, arXiv 2401.15077;
EAGLE-2, arXiv 2406.16858; EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_folder import embedded_path
from glowplug.core.plugin.byte_costs import state_drafts_bytes
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.plugins.speculative.knobs import KnobOptions

SHIPPED = "eagle3"  #: folder of the embedded model's head, beside its checkpoint


class EagleOptions(KnobOptions):
    use: Literal["eagle"] = "eagle"
    steps: int = Field(
        3, description="tokens drafted after each step; each takes one pass of the head"
    )
    draft_model: str | None = Field(
        None, description="folder of the EAGLE head; None: the one shipped with the embedded model"
    )

    def draft_for(self, model: str) -> str | None:
        if self.draft_model is None and model == str(embedded_path()):
            return str(embedded_path().parent / SHIPPED)
        return self.draft_model


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse knobs that do not fit together, and a draft vocabulary that cannot be used.

    Other checks, of all algorithms and of model families, refuse heads that do not fit the target.
    """
    options: EagleOptions = context.options
    yield from options.refusals("eagle", context)


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="eagle",
            options=EagleOptions,
            factory="glowplug.plugins.speculative.eagle_runtime:Eagle",
            check=check_options,
            offers=SpeculativeOffers(
                adapts=True,
                drafts=True,
                eagle_head=True,
                first_key=True,
                simulates=True,
                modes=EVERY_MODE_GRAPH,
                reserves=state_drafts_bytes,
            ),
            summary="drafts by an EAGLE head trained for the model; the same tokens in fewer steps",
        )
    ]
