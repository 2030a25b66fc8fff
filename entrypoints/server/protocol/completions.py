"""Request body of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from glowplug.entrypoints.server.protocol.fields import (
    INT32,
    Bool,
    Int,
    Logprobs,
    MaxTokens,
    SamplingFields,
    TokenIds,
)

MAX_PROMPTS = 256  #: prompts in one request


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
        | None
    ) = Field(None, description="a text, a list of texts, token ids, or a list of token id lists")
    max_tokens: MaxTokens | None = Field(None, description="default 16; 0 is allowed with echo")
    echo: Bool | None = False
    logprobs: Logprobs | None = None
    best_of: Annotated[Int, Field(ge=1, le=INT32)] | None = None
    add_special_tokens: Bool = True
