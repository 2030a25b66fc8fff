"""Models of the bodies that ``/v1/responses`` returns, for ``/openapi.json`` only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: str
    message: str


class OutputItem(BaseModel):
    """A message, reasoning or a function's call; further fields depend on the type."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseBody(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    store: bool
    instructions: str | None
    previous_response_id: str | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    top_logprobs: int
    max_output_tokens: int | None
    parallel_tool_calls: bool
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: Literal["auto", "disabled"]


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
