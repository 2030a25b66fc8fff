"""Models of response bodies, for ``/openapi.json`` only.

The server writes these bodies directly with orjson.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: None


class Called(BaseModel):
    name: str
    arguments: str


class CalledTool(BaseModel):
    id: str
    type: Literal["function"]
    function: Called


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str
    text: str


class TokenizerInfo(BaseModel):
    """Settings of the tokenizer. Other special tokens (``unk_token``, ...) are further fields."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    chat_template: str | None
    model_max_length: int


class Status(BaseModel):
    status: str


class Done(BaseModel):
    success: bool
    message: str


class AnyGenerated(RootModel[Generated | list[Generated]]):
    """The response of ``/generate``: an object for one sequence, a list for several."""


class Version(BaseModel):
    version: str


class KvPool(BaseModel):
    used_tokens: int
    cached_tokens: int
    total_tokens: int
    usage: float


class Sums(BaseModel):
    """Sum and number of measured times."""

    seconds: float
    count: int


class ActiveRequest(BaseModel):
    """A request in flight."""

    id: str
    sequences: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token_seconds: float | None


class EngineStatus(BaseModel):
    status: Literal["starting", "ready", "draining", "silent", "dead"]
    version: str
    model: str
    fingerprint: str
    started: int
    time: float
    progress: dict[str, str]
    running: int
    waiting: int
    kv: KvPool
    counters: dict[str, float]
    latency: dict[str, Sums]
    cache_hit_rate: float | None
    accept_length: dict[str, float | None] | None
    requests: list[ActiveRequest]
    requests_in_flight: int


class ModelInfo(BaseModel):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    architecture: str
    vocab_size: int
    context_length: int
    dtype: str
    quantization: str
    has_chat_template: bool
    thinking_switch: bool
    status: str


class ServerInfo(BaseModel):
    version: str
    status: str
    model: str
    sizes: dict[str, Any]
    choices: dict[str, str]
    decisions: list[dict[str, Any]]
    stats: dict[str, Any]
    groups: list[dict[str, Any]]
    engine: dict[str, Any]
