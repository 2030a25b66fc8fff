"""Field types, and the sampling fields shared by the OpenAI routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from glowplug.core.step.request import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from glowplug.entrypoints.server.protocol.body import Body
from glowplug.entrypoints.server.protocol.structured import OpenAIGrammarFields

INT32 = (1 << 31) - 1
MAX_TOKENS_LIMIT = INT32
MAX_IDS = 4 << 20  #: token ids in one prompt; the context length is checked later

# NOTE: numbers are strict because pydantic would otherwise convert "1" and true to 1. A strict
# float still accepts integers.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS)]
StopStrings = str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:\-]+$")]

MaxTokens = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS_LIMIT)]
Logprobs = Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)]


class StreamOptions(Body):
    include_usage: Bool = Field(
        False, description="send a last chunk with the usage and no choices"
    )
    continuous_usage_stats: Bool = Field(False, description="send the usage so far in every chunk")


class SamplingFields(OpenAIGrammarFields):
    """The sampling and stopping fields that the OpenAI routes share; None: the default."""

    temperature: Annotated[Float, Field(ge=0.0, le=100.0)] | None = Field(
        None, description="0 is greedy; default 1"
    )
    top_p: Annotated[Float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=INT32)] | None = Field(None, description="0 or -1: off")
    min_p: Annotated[Float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[Float, Field(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, Annotated[Float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=1024, description="bias by token id (a string)"
    )
    seed: Annotated[Int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_N)] | None = Field(
        None, description="choices per prompt; default 1"
    )
    stop: StopStrings = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    min_tokens: Annotated[Int, Field(ge=0, le=INT32)] | None = None
    ignore_eos: Bool = False
    skip_special_tokens: Bool = True
    include_stop_str_in_output: Bool = False
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=1 << 20)] | None = None
    stream: Bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: Bool | None = False
    return_tokens_as_token_ids: Bool | None = False
    priority: Annotated[Int, Field(ge=-INT32, le=INT32)] | None = Field(
        None, description="smaller runs earlier"
    )
    request_id: RequestId | None = None
    rid: RequestId | None = Field(None, description="alias of request_id")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="requests share cached prefixes only if their salts are equal"
    )
    ext: dict[str, Any] | None = Field(
        None, description="fields that components of the engine declare for requests"
    )
    model: Annotated[str, Field(max_length=512)] | None = None
