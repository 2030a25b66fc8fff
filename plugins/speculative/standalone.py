"""Standalone: drafts by a small whole model with the target's tokenizer.

The draft is a model of any family, with attention and a KV cache of its own. A chain or tree of
``steps`` tokens is drafted after each step and verified by the next one. The output is, token for
token, the same as without speculation. Source: speculative decoding, arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.plugins.speculative.knobs import KnobOptions


class StandaloneOptions(KnobOptions):
    use: Literal["standalone"] = "standalone"
    steps: int = Field(
        3, description="tokens drafted after each step; each takes one pass of the draft model"
    )
    draft_model: str | None = Field(
        None, description="folder of a small model with the tokenizer of the model"
    )


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse knobs that do not fit together, and a draft vocabulary that cannot be used.

    Checks common to all algorithms refuse draft models that do not fit the target.
    """
    options: StandaloneOptions = context.options
    yield from options.refusals("standalone", context)


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="standalone",
            options=StandaloneOptions,
            factory="glowplug.plugins.speculative.standalone_runtime:Standalone",
            check=check_options,
            offers=SpeculativeOffers(
                adapts=True,
                drafts=True,
                whole_model=True,
                simulates=True,
                modes=EVERY_MODE_GRAPH,
            ),
            summary="drafts by a small whole model; the same tokens in fewer steps",
        )
    ]
