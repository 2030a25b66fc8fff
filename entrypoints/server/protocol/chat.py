"""Request body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from glowplug.entrypoints.server.protocol.body import Body
from glowplug.entrypoints.server.protocol.fields import (
    Bool,
    Logprobs,
    MaxTokens,
    SamplingFields,
    TokenIds,
)
from glowplug.entrypoints.server.protocol.tools import MAX_CALLS, MessageCall, ToolFields

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(Body):
    """One part of a message's content. Only ``type: "text"`` is accepted."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a conversation. ``reasoning`` is another name of ``reasoning_content``."""

    role: Role
    content: str | Annotated[list[ContentPart], Field(max_length=4096)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class ChatRequest(SamplingFields, ToolFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=16384)] | None = Field(
        None, description="the conversation; required unless input_ids is given"
    )
    input_ids: TokenIds | None = Field(
        None, description="token ids of a rendered prompt, instead of messages"
    )
    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = Field(None, description="older name of max_completion_tokens")
    logprobs: Bool | None = False
    top_logprobs: Logprobs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=16, description="thinking, enable_thinking, reasoning_effort"
    )
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool = False
    separate_reasoning: Bool = Field(
        True, description="return reasoning in its own field; false: leave it in content"
    )
    stream_reasoning: Bool = Field(
        True, description="false: send reasoning in one piece when it is complete"
    )
    include_reasoning: Bool = Field(True, description="false: omit reasoning from the response")
    echo: Bool = False

    @property
    def wanted_tokens(self) -> int | None:
        """The requested output limit in tokens; None if not given."""
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )
