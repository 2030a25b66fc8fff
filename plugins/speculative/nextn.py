"""NextN: drafts by the checkpoint's multi-token-prediction layer.

A chain or tree of ``steps`` tokens is drafted after each step and verified by the next one. The
output is, token for token, the same as without speculation. Source: DeepSeek-V3, arXiv 2412.19437,
section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.byte_costs import state_drafts_bytes
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.plugins.speculative.knobs import KnobOptions


class NextNOptions(KnobOptions):
    use: Literal["nextn"] = "nextn"
    steps: int = Field(
        1, description="tokens drafted after each step; each takes one pass of the NextN layer"
    )
    draft_model: str | None = Field(
        None, description="folder of an exported NextN layer; None: the checkpoint's own"
    )


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse knobs that do not fit together, and a draft vocabulary that cannot be used.

    Another check, common to all algorithms, refuses checkpoints without a NextN layer.
    """
    options: NextNOptions = context.options
    yield from options.refusals("nextn", context)


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="nextn",
            options=NextNOptions,
            factory="glowplug.plugins.speculative.nextn_runtime:NextN",
            check=check_options,
            offers=SpeculativeOffers(
                adapts=True,
                drafts=True,
                nextn_layer=True,
                first_key=True,
                simulates=True,
                modes=EVERY_MODE_GRAPH,
                reserves=state_drafts_bytes,
            ),
            summary="drafts by the checkpoint's own NextN layer; the same tokens in fewer steps",
        )
    ]
