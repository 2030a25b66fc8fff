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
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.plugins.speculative.knobs import check_knobs, shape_of_knobs


class NextNOptions(SpeculativeOptions):
    use: Literal["nextn"] = "nextn"
    steps: int = Field(
        1, description="tokens drafted after each step; each takes one pass of the NextN layer"
    )
    topk: int = Field(
        1, description="drafts that each pass expands, and branches of each; 1: a chain"
    )
    draft_tokens: int | None = Field(
        None,
        description="tokens verified per step, the last accepted one included; None: steps + 1 for "
        "a chain, steps + topk for a tree, if a tree has as many",
    )
    draft_model: str | None = Field(
        None, description="folder of an exported NextN layer; None: the checkpoint's own"
    )

    def width(self) -> int:
        return self.draft_shape().tokens

    def draft_shape(self) -> DraftShape:
        return shape_of_knobs(self.steps, self.topk, self.draft_tokens)

    def draft_folder(self) -> str | None:
        return self.draft_model


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse knobs of the drafts that do not fit together.

    Another check, common to all algorithms, refuses checkpoints without a NextN layer.
    """
    options: NextNOptions = context.options
    yield from check_knobs("nextn", options.steps, options.topk, options.draft_tokens)


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
                modes=EVERY_MODE_GRAPH,
            ),
            summary="drafts by the checkpoint's own NextN layer; the same tokens in fewer steps",
        )
    ]
