"""Bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from glowplug.core.step.request import MAX_STOP_STRINGS
from glowplug.entrypoints.server.protocol.body import Body
from glowplug.entrypoints.server.protocol.fields import Bool, Int, SamplingFields
from glowplug.entrypoints.server.protocol.tools import MAX_TOOLS, FunctionName

MAX_BLOCKS = 4096  #: blocks of a message
MAX_MESSAGES = 16384  #: messages of a request
UseId = Annotated[str, Field(min_length=1, max_length=256)]


class ContentBlock(Body):
    """A block of content: text, thinking, tool_use or tool_result."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: UseId | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: UseId | None = None
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_BLOCKS)] | None = None
    is_error: Bool | None = None


ContentBlocks = Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS)]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | ContentBlocks


class MessageTool(Body):
    """A tool. Only those that the client runs are accepted: without a type, or "custom"."""

    type: Annotated[str, Field(max_length=64)] | None = None
    name: FunctionName
    description: Annotated[str, Field(max_length=1 << 20)] | None = None
    input_schema: dict[str, Any] | None = None
    strict: Bool | None = None
    defer_loading: Bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: Bool | None = None


class Thinking(Body):
    type: Annotated[str, Field(max_length=64)]
    budget_tokens: Annotated[Int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = Field(None, description="json_schema with its schema")


class CountRequest(SamplingFields):
    """The body of ``/v1/messages/count_tokens``: the fields that the prompt depends on."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | ContentBlocks | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)


class MessagesRequest(CountRequest):
    max_tokens: Annotated[Int, Field(ge=1, le=(1 << 31) - 1)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: dict[str, Any] | None = Field(None, max_length=16)
    service_tier: Literal["auto", "standard_only"] | None = None


class ThinkingDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class OutputBlock(BaseModel):
    """Text, thinking or tool_use; further fields depend on the type."""

    type: Literal["text", "thinking", "tool_use"]


class MessageBody(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(BaseModel):
    input_tokens: int


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None = None
