"""Request bodies of ``/generate``, the text routes and operations, with SGLang's field names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from glowplug.core.step.request import MAX_LOGPROBS, MAX_N
from glowplug.entrypoints.server.protocol.body import Body
from glowplug.entrypoints.server.protocol.chat import Message
from glowplug.entrypoints.server.protocol.completions import MAX_PROMPTS
from glowplug.entrypoints.server.protocol.fields import (
    INT32,
    Bool,
    Float,
    Int,
    MaxTokens,
    RequestId,
    StopStrings,
    TokenId,
    TokenIds,
)
from glowplug.entrypoints.server.protocol.structured import GrammarFields


class NativeSampling(GrammarFields):
    max_new_tokens: MaxTokens | None = Field(None, description="default 128")
    min_new_tokens: Annotated[Int, Field(ge=0, le=INT32)] | None = None
    temperature: Annotated[Float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[Float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[Float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[Float, Field(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, Annotated[Float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=1024
    )
    n: Annotated[Int, Field(ge=1, le=MAX_N)] | None = None
    seed: Annotated[Int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    sampling_seed: Annotated[Int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopStrings = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: Bool = False
    skip_special_tokens: Bool = True
    no_stop_trim: Bool = Field(False, description="keep the stop string in the text")
    ext: dict[str, Any] | None = Field(
        None, description="fields that components of the engine declare for requests"
    )


class GenerateRequest(Body):
    text: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)] | None = None
    sampling_params: (
        NativeSampling | Annotated[list[NativeSampling], Field(max_length=MAX_PROMPTS)] | None
    ) = None
    stream: Bool | None = False
    return_logprob: Bool | None = False
    logprob_start_len: Annotated[Int, Field(ge=-1, le=INT32)] | None = Field(
        None, description="first prompt token whose log-probability is returned; -1: none"
    )
    top_logprobs_num: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: Bool | None = False
    rid: RequestId | Annotated[list[RequestId], Field(max_length=MAX_PROMPTS)] | None = None
    priority: Annotated[Int, Field(ge=-INT32, le=INT32)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None


class TokenizeRequest(Body):
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=16384)] | None = None
    model: Annotated[str, Field(max_length=512)] | None = None
    add_special_tokens: Bool | None = Field(
        None, description="default: true for a prompt, false for messages"
    )
    add_generation_prompt: Bool = True
    return_token_strs: Bool | None = False


class DetokenizeRequest(Body):
    tokens: TokenIds
    model: Annotated[str, Field(max_length=512)] | None = None
    skip_special_tokens: Bool = False


class AbortRequest(Body):
    rid: RequestId | None = None
    abort_all: Bool = False


class ProfileRequest(Body):
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")] = "profile"
    num_steps: Annotated[Int, Field(ge=1, le=100000)] | None = None
