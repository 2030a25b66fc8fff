"""N-gram drafts (prompt lookup): the tokens that followed the row's last tokens the last time.

They suit answers that repeat parts of the prompt or of themselves. No draft model runs, and the
output is, token for token, the same as without speculation. Source: prompt lookup decoding (Saxena
2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.byte_costs import found_drafts_bytes
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.plugins.speculative.knobs import check_knobs, shape_of_knobs

STEPS = 4  #: tokens of a branch by default
LOOKUP_MAX = 32  #: largest option ``prompt_lookup_max``
TOPK_MAX = 8  #: largest option ``topk``; each branch takes a search of the row's tokens


class NGramOptions(SpeculativeOptions):
    use: Literal["ngram"] = "ngram"
    steps: int | None = Field(
        None,
        description="tokens drafted one after another; None: draft_tokens - 1 for a chain, if that "
        f"is given, else {STEPS}",
    )
    topk: int = Field(1, description="earlier occurrences that are continued; 1: a chain")
    draft_tokens: int | None = Field(
        None,
        description="tokens verified per step, the last accepted one included; None: steps + 1 for "
        "a chain, steps + topk for a tree",
    )
    prompt_lookup_max: int = Field(
        5, description="most of a row's last tokens that an earlier occurrence has to equal"
    )
    prompt_lookup_min: int = Field(
        1, description="fewest of a row's last tokens that an earlier occurrence has to equal"
    )

    def drafted_steps(self) -> int:
        """Return the number of tokens that are drafted one after another."""
        if self.steps is not None:
            return self.steps
        if self.topk != 1 or self.draft_tokens is None:
            return STEPS
        return self.draft_tokens - 1

    def width(self) -> int:
        return self.draft_shape().tokens

    def draft_shape(self) -> DraftShape:
        return shape_of_knobs(self.drafted_steps(), self.topk, self.draft_tokens)

    def lookahead(self) -> int:
        return 0  # there is no draft model


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse knobs of the drafts that do not fit together, and impossible lengths of a match."""
    options: NGramOptions = context.options
    steps = options.drafted_steps()
    refused = [*check_knobs("ngram", steps, options.topk, options.draft_tokens)]
    yield from refused or _check_branches(options)
    yield from _check_lookup(options)


def _check_branches(options: NGramOptions) -> Iterator[Refusal]:
    """Refuse trees that do not hold the best branch, or have more tokens than all branches."""
    shape = options.draft_shape()
    if not shape.is_tree:
        return
    if shape.topk > TOPK_MAX:
        yield _refuse(
            "topk",
            f"topk is {shape.topk}; at most {TOPK_MAX} occurrences are continued",
            f"speculative.topk = {TOPK_MAX}",
        )
    most = 1 + shape.steps * shape.topk
    if not shape.steps < shape.tokens <= most:
        yield _refuse(
            "draft_tokens",
            f"draft_tokens is {shape.tokens}; {shape.topk} branches of {shape.steps} tokens after "
            f"the last accepted one take {shape.steps + 1} to {most}",
            f"speculative.draft_tokens = {shape.steps + shape.topk}, or leave it out",
        )


def _check_lookup(options: NGramOptions) -> Iterator[Refusal]:
    """Refuse impossible lengths of a match."""
    longest = options.prompt_lookup_max
    shortest = options.prompt_lookup_min
    if not 1 <= longest <= LOOKUP_MAX:
        yield _refuse(
            "prompt_lookup_max",
            f"prompt_lookup_max is {longest}; 1 to {LOOKUP_MAX} tokens can be compared",
            f"speculative.prompt_lookup_max = {min(max(longest, 1), LOOKUP_MAX)}",
        )
    elif not 1 <= shortest <= longest:
        yield _refuse(
            "prompt_lookup_min",
            f"prompt_lookup_min is {shortest}; it is at least 1 and at most prompt_lookup_max, "
            f"which is {longest}",
            f"speculative.prompt_lookup_min = {min(max(shortest, 1), longest)}",
        )


def _refuse(field: str, reason: str, fix: str) -> Refusal:
    return Refusal("ngram", f"speculative.{field}", reason, fix)


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="ngram",
            options=NGramOptions,
            factory="glowplug.plugins.speculative.ngram_runtime:NGram",
            check=check_options,
            offers=SpeculativeOffers(
                adapts=True,
                drafts=True,
                foresees=True,
                simulates=True,
                modes=EVERY_MODE_GRAPH,
                reserves=found_drafts_bytes,
            ),
            summary="drafts copied from earlier text of the request; the same tokens in fewer "
            "steps",
        )
    ]
