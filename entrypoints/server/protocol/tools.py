"""Fields of request bodies for tool calls, as OpenAI spells them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from glowplug.entrypoints.front.chat.tools import NAME
from glowplug.entrypoints.server.protocol.body import Body

MAX_TOOLS = 1024  #: tools of a request
MAX_CALLS = 1024  #: tool calls of a message

FunctionName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class FunctionSpec(Body):
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments."""

    name: FunctionName
    description: Annotated[str, Field(max_length=1 << 20)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Body):
    name: FunctionName


class ChosenTool(Body):
    """The one function that the model has to call."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Body):
    """A call that the model has made. ``arguments`` is JSON, as text or as an object."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str | dict[str, Any] = "{}"


class MessageCall(Body):
    """A tool call in a message of the assistant."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFields(Body):
    """The fields of a request with tools."""

    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call"
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        None, description="default auto with tools; a function's object requires a call of it"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call in an answer"
    )
