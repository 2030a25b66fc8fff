"""NextN: drafts by the checkpoint's multi-token-prediction layer.

A chain of ``steps`` tokens is drafted after each step and verified by the next one. The output is,
token for token, the same as without speculation. Source: DeepSeek-V3, arXiv 2412.19437, section
2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.core.plugin.options import SpeculativeOptions

STEPS_MAX = 15  #: largest option ``steps``


class NextNOptions(SpeculativeOptions):
    use: Literal["nextn"] = "nextn"
    steps: int = Field(
        1, description="tokens drafted after each step; each takes one pass of the NextN layer"
    )
    topk: int = Field(
        1, description="drafts considered at each position; always 1, because NextN drafts a chain"
    )
    draft_tokens: int | None = Field(None, description="tokens verified per step; None: steps + 1")
    draft_model: str | None = Field(
        None, description="folder of an exported NextN layer; None: the checkpoint's own"
    )

    def width(self) -> int:
        return self.lookahead() + 1

    def lookahead(self) -> int:
        return max(self.steps, 1)

    def draft_folder(self) -> str | None:
        return self.draft_model


def _refuse(field: str, reason: str, fix: str) -> Refusal:
    return Refusal("nextn", f"speculative.{field}", reason, fix)


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse option values other than those of a chain: one draft per position and row.

    Another check, common to all algorithms, refuses checkpoints without a NextN layer.
    """
    options: NextNOptions = context.options
    if not 1 <= options.steps <= STEPS_MAX:
        yield _refuse(
            "steps",
            f"steps is {options.steps}; a chain drafts 1 to {STEPS_MAX} tokens",
            f"speculative.steps = {min(max(options.steps, 1), STEPS_MAX)}",
        )
    elif options.draft_tokens not in (None, options.steps + 1):
        yield _refuse(
            "draft_tokens",
            f"draft_tokens is {options.draft_tokens}; a chain of {options.steps} steps verifies "
            f"{options.steps + 1}: the last accepted token and one per step",
            f"speculative.draft_tokens = {options.steps + 1}, or leave it out",
        )
    if options.topk != 1:
        yield _refuse(
            "topk",
            f"topk is {options.topk}; the NextN layer drafts a chain, one token at each position",
            "speculative.topk = 1",
        )


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="nextn",
            options=NextNOptions,
            factory="glowplug.plugins.speculative.nextn_runtime:NextN",
            check=check_options,
            offers=SpeculativeOffers(
                drafts=True,
                nextn_layer=True,
                first_key=True,
                simulates=True,
                modes=EVERY_MODE_GRAPH,
            ),
            summary="drafts by the checkpoint's own NextN layer; the same tokens in fewer steps",
        )
    ]
