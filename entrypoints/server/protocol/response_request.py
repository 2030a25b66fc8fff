"""Request body of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from glowplug.entrypoints.server.protocol.body import Body
from glowplug.entrypoints.server.protocol.fields import Bool, Int, SamplingFields
from glowplug.entrypoints.server.protocol.tools import MAX_TOOLS, FunctionName

MAX_ITEMS = 16384  #: items of an input
MAX_TOP_LOGPROBS = 20
CallId = Annotated[str, Field(min_length=1, max_length=256)]
ResponseId = Annotated[str, Field(min_length=1, max_length=128)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InputPart(Body):
    """One part of an item's content: input_text, output_text, refusal, reasoning_text or text."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None


InputParts = Annotated[list[InputPart], Field(max_length=4096)]


class InputItem(Body):
    """An item of the input: a message, a function's call or its output, or reasoning.

    Without a type it is a message.
    """

    type: Annotated[str, Field(max_length=64)] | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | InputParts | None = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | InputParts | None = None
    summary: InputParts | None = None
    encrypted_content: str | None = None


class ResponseTool(Body):
    """A tool. Only those of type "function" are accepted."""

    type: Annotated[str, Field(max_length=64)]
    name: FunctionName | None = None
    description: Annotated[str, Field(max_length=1 << 20)] | None = None
    parameters: dict[str, Any] | None = None
    strict: Bool | None = None


class NamedTool(Body):
    """A choice of one function, or one of the tools that may be called."""

    type: Annotated[str, Field(max_length=64)]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class ReasoningFields(Body):
    effort: Effort | None = Field(None, description="none turns reasoning off, others turn it on")
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFields(Body):
    format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema")
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Bool | None = None


class ResponseRequest(SamplingFields):
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)] | None = (
        Field(None, description="a text, or items")
    )
    instructions: str | None = Field(None, description="a system message before the conversation")
    previous_response_id: ResponseId | None = Field(
        None, description="a stored response that this one continues"
    )
    store: Bool | None = Field(None, description="keep the response in memory; default true")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    max_output_tokens: Annotated[Int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
