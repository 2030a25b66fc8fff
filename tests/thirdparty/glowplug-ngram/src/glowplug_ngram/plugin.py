"""The declaration of the speculative algorithm "prompt_copy". It imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.api import (
    CheckContext,
    Component,
    DraftShape,
    Refusal,
    SpeculativeOffers,
    SpeculativeOptions,
    hookimpl,
    token_drafts_bytes,
)


class PromptCopyOptions(SpeculativeOptions):
    use: Literal["prompt_copy"] = "prompt_copy"
    steps: int = Field(4, ge=1, le=15, description="tokens drafted after each step")
    longest: int = Field(4, ge=1, le=16, description="most last tokens that are looked up")
    shortest: int = Field(1, ge=1, le=16, description="fewest last tokens that are looked up")

    def width(self) -> int:
        return self.steps + 1

    def draft_shape(self) -> DraftShape:
        return DraftShape.chain(self.steps)

    def lookahead(self) -> int:
        return 0  # there is no draft model that would write to the KV cache


def check_lengths(context: CheckContext) -> Iterator[Refusal]:
    """Refuse lengths of which the fewest is more than the most."""
    longest, shortest = context.options.longest, context.options.shortest
    if shortest > longest:
        yield Refusal(
            by="prompt_copy",
            field="speculative.shortest",
            reason=f"shortest is {shortest}, which is more than longest, {longest}",
            fix=f"speculative.shortest = {longest}",
        )


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="prompt_copy",
            options=PromptCopyOptions,
            factory="glowplug_ngram.runtime:PromptCopy",
            check=check_lengths,
            offers=SpeculativeOffers(
                drafts=True, adapts=True, simulates=True, reserves=token_drafts_bytes
            ),
            contract=2,
            summary="drafts the tokens that followed the last tokens when they occurred before",
        )
    ]
