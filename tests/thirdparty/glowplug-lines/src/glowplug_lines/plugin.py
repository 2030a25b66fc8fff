"""The declaration of the speculative algorithm "lines". It imports no torch."""

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


class LinesOptions(SpeculativeOptions):
    use: Literal["lines"] = "lines"
    steps: int = Field(4, ge=1, le=15, description="tokens drafted after each step")
    newline: int = Field(198, ge=0, description="id of the token that ends a line")

    def width(self) -> int:
        return self.steps + 1

    def draft_shape(self) -> DraftShape:
        return DraftShape.chain(self.steps)

    def lookahead(self) -> int:
        return 0  # there is no draft model that would write to the KV cache


def check_newline(context: CheckContext) -> Iterator[Refusal]:
    """Refuse an id that no token has."""
    vocabulary = context.facts.model.vocab_size
    if context.options.newline >= vocabulary:
        yield Refusal(
            by="lines",
            field="speculative.newline",
            reason=f"newline is {context.options.newline}, the model has {vocabulary} tokens",
            fix=f"speculative.newline = the id of the newline, below {vocabulary}",
        )


@hookimpl
def register_speculative_algorithms() -> list[Component]:
    return [
        Component(
            name="lines",
            options=LinesOptions,
            factory="glowplug_lines.runtime:Lines",
            check=check_newline,
            offers=SpeculativeOffers(
                drafts=True, adapts=True, simulates=True, reserves=token_drafts_bytes
            ),
            contract=2,
            summary="drafts the tokens of the line above, from the present column on",
        )
    ]
