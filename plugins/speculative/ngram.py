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
from glowplug.core.plugin.byte_costs import NUMBER_BYTES, DecodingRows
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, SpeculativeOffers
from glowplug.core.plugin.options import SpeculativeOptions

STEPS = 4  #: tokens of a branch by default
STEPS_MAX = 15  #: largest option ``steps``
LOOKUP_MAX = 32  #: largest option ``prompt_lookup_max``


class NGramOptions(SpeculativeOptions):
    use: Literal["ngram"] = "ngram"
    steps: int | None = Field(
        None, description=f"tokens drafted after each step; None: draft_tokens - 1, or {STEPS}"
    )
    topk: int = Field(
        1,
        description="drafts considered at each position; always 1, because the drafts are a chain",
    )
    draft_tokens: int | None = Field(None, description="tokens verified per step; None: steps + 1")
    prompt_lookup_max: int = Field(
        5, description="most of a row's last tokens that an earlier occurrence has to equal"
    )
    prompt_lookup_min: int = Field(
        1, description="fewest of a row's last tokens that an earlier occurrence has to equal"
    )

    def shape(self) -> DraftShape:
        """Return the size of the drafts. Options that a check refuses give the nearest size."""
        steps = self.steps
        if steps is None:
            steps = STEPS if self.draft_tokens is None else self.draft_tokens - 1
        steps = max(steps, 1)
        return DraftShape(steps, 1, steps + 1)

    def width(self) -> int:
        return self.shape().tokens


def _refuse(field: str, reason: str, fix: str) -> Refusal:
    return Refusal("ngram", f"speculative.{field}", reason, fix)


def check_options(context: CheckContext) -> Iterator[Refusal]:
    """Refuse option values that give no chain of drafts, and impossible lengths of a match."""
    options: NGramOptions = context.options
    yield from _check_shape(options)
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


def _check_shape(options: NGramOptions) -> Iterator[Refusal]:
    """Refuse sizes of drafts that are not those of a chain."""
    steps = options.steps
    tokens = options.draft_tokens
    if steps is None and tokens is not None and not 2 <= tokens <= STEPS_MAX + 1:
        yield _refuse(
            "draft_tokens",
            f"draft_tokens is {tokens}; a chain verifies 2 to {STEPS_MAX + 1} tokens",
            f"speculative.draft_tokens = {min(max(tokens, 2), STEPS_MAX + 1)}",
        )
    elif steps is not None and not 1 <= steps <= STEPS_MAX:
        yield _refuse(
            "steps",
            f"steps is {steps}; a chain drafts 1 to {STEPS_MAX} tokens",
            f"speculative.steps = {min(max(steps, 1), STEPS_MAX)}",
        )
    elif steps is not None and tokens not in (None, steps + 1):
        yield _refuse(
            "draft_tokens",
            f"draft_tokens is {tokens}; a chain of {steps} steps verifies {steps + 1}: the last "
            "accepted token and one per step",
            f"speculative.draft_tokens = {steps + 1}, or leave it out",
        )
    if options.topk != 1:
        yield _refuse(
            "topk", f"topk is {options.topk}; the drafts are a chain", "speculative.topk = 1"
        )


def token_bytes(step: DecodingRows) -> int:
    """Return the bytes of the rows' tokens and lengths."""
    return step.rows * (step.positions + 2) * NUMBER_BYTES


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="ngram",
            options=NGramOptions,
            factory="glowplug.plugins.speculative.ngram_runtime:NGram",
            check=check_options,
            offers=SpeculativeOffers(drafts=True, modes=EVERY_MODE_GRAPH, reserves=token_bytes),
            summary="drafts copied from earlier text of the request; the same tokens in fewer "
            "steps",
        )
    ]
