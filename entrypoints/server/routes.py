"""The table of the server's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from glowplug.core.facts.expert_load import ExpertLoad
from glowplug.entrypoints.server import operations
from glowplug.entrypoints.server.messages import create as messages
from glowplug.entrypoints.server.native import generate, tokenize
from glowplug.entrypoints.server.openai import chat, completions
from glowplug.entrypoints.server.page import status
from glowplug.entrypoints.server.protocol import responses
from glowplug.entrypoints.server.protocol.chat import ChatRequest
from glowplug.entrypoints.server.protocol.completions import CompletionRequest
from glowplug.entrypoints.server.protocol.messages import (
    CountRequest,
    MessageBody,
    MessageError,
    MessagesRequest,
    TokensCount,
)
from glowplug.entrypoints.server.protocol.native import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    ProfileRequest,
    TokenizeRequest,
)
from glowplug.entrypoints.server.protocol.response_body import (
    DeletedResponse,
    InputItemList,
    ResponseBody,
)
from glowplug.entrypoints.server.protocol.response_request import ResponseRequest
from glowplug.entrypoints.server.refused import REASONS, refusal
from glowplug.entrypoints.server.responses import create, stored

ERRORS = {
    400: "The request is wrong; `error.param` names the field.",
    401: "Missing or wrong API key.",
    403: "The route needs the admin key.",
    404: "Unknown model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; see the header `Retry-After`.",
    431: "Too many or too large headers.",
    500: "Internal server error.",
    503: "Starting, draining, or the engine has stopped.",
    504: "The request ran out of time.",
}


@dataclass(frozen=True)
class HttpRoute:
    """One route of the server, with its description for ``/openapi.json``.

    Attributes:
        path, methods: path and HTTP methods.
        endpoint: coroutine that handles a request.
        tag: heading in ``/openapi.json``.
        answer: model of the response body for ``/openapi.json``; None: plain text. With
            ``ErrorBody`` the route refuses every request.
        body: model of the request body for ``/openapi.json``; None: no body.
        stream: the route can also respond with server-sent events.
        admin: the route needs the admin key.
        poll: monitors call the route periodically; its requests are logged at level debug.
        error: model of the body of errors.
    """

    path: str
    endpoint: Callable[..., Awaitable[Response]]
    methods: tuple[str, ...]
    tag: str
    answer: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    stream: bool = False
    admin: bool = False
    poll: bool = False
    error: type[BaseModel] = responses.ErrorBody

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """Return FastAPI's argument ``responses``: the models of regular and error responses."""
        good: dict[str, Any] = {"description": "The answer."}
        if self.answer is not None:
            good["model"] = self.answer
        else:
            good["content"] = {"text/plain": {"schema": {"type": "string"}}}
        if self.stream:
            good["content"] = {
                "text/event-stream": {"schema": {"description": "data: events, then data: [DONE]"}}
            }
        # NOTE: with a "model" FastAPI makes a field for each route and status: 0.1 s of the start
        content = {"application/json": {"schema": _reference(self.error)}}
        bad: dict[int | str, dict[str, Any]] = {
            code: {"description": text, "content": content} for code, text in ERRORS.items()
        }
        return bad if self.answer is responses.ErrorBody else {200: good, **bad}

    def request(self) -> dict[str, Any] | None:
        """Return the entry for the request body in ``/openapi.json``; None without a body."""
        if self.body is None:
            return None
        return {
            "requestBody": {
                "required": self.body is not ProfileRequest,
                "content": {"application/json": {"schema": _reference(self.body)}},
            }
        }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    """Return the schema that refers to ``model`` in the components of ``/openapi.json``."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


_GET = ("GET",)
_POST = ("POST",)
_GET_POST = ("GET", "POST")
_OPENAI = "OpenAI"
_ANTHROPIC = "Anthropic"
_NATIVE = "native"
_TEXT = "text"
_OPERATIONS = "operations"

ROUTES: tuple[HttpRoute, ...] = (
    HttpRoute(
        "/v1/chat/completions",
        chat.chat,
        _POST,
        _OPENAI,
        responses.ChatCompletion,
        ChatRequest,
        stream=True,
    ),
    HttpRoute(
        "/v1/completions",
        completions.completions,
        _POST,
        _OPENAI,
        responses.Completion,
        CompletionRequest,
        stream=True,
    ),
    HttpRoute(
        "/v1/responses",
        create.create,
        _POST,
        _OPENAI,
        ResponseBody,
        ResponseRequest,
        stream=True,
    ),
    HttpRoute("/v1/responses/{response_id}", stored.retrieve, _GET, _OPENAI, ResponseBody),
    HttpRoute("/v1/responses/{response_id}", stored.delete, ("DELETE",), _OPENAI, DeletedResponse),
    HttpRoute("/v1/responses/{response_id}/cancel", stored.cancel, _POST, _OPENAI, ResponseBody),
    HttpRoute(
        "/v1/responses/{response_id}/input_items", stored.list_items, _GET, _OPENAI, InputItemList
    ),
    HttpRoute(
        "/v1/messages",
        messages.create,
        _POST,
        _ANTHROPIC,
        MessageBody,
        MessagesRequest,
        stream=True,
        error=MessageError,
    ),
    HttpRoute(
        "/v1/messages/count_tokens",
        messages.count_tokens,
        _POST,
        _ANTHROPIC,
        TokensCount,
        CountRequest,
        error=MessageError,
    ),
    HttpRoute("/v1/models", tokenize.models, _GET, _OPENAI, responses.ModelList),
    HttpRoute("/v1/models/{model:path}", tokenize.model, _GET, _OPENAI, responses.ModelCard),
    HttpRoute(
        "/generate",
        generate.generate,
        ("POST", "PUT"),
        _NATIVE,
        responses.AnyGenerated,
        GenerateRequest,
        stream=True,
    ),
    HttpRoute("/tokenize", tokenize.tokenize, _POST, _TEXT, responses.Tokenized, TokenizeRequest),
    HttpRoute(
        "/v1/tokenize", tokenize.tokenize, _POST, _TEXT, responses.Tokenized, TokenizeRequest
    ),
    HttpRoute(
        "/detokenize", tokenize.detokenize, _POST, _TEXT, responses.Detokenized, DetokenizeRequest
    ),
    HttpRoute(
        "/v1/detokenize",
        tokenize.detokenize,
        _POST,
        _TEXT,
        responses.Detokenized,
        DetokenizeRequest,
    ),
    HttpRoute("/tokenizer_info", tokenize.tokenizer_info, _GET, _TEXT, responses.TokenizerInfo),
    HttpRoute("/v1/tokenizer_info", tokenize.tokenizer_info, _GET, _TEXT, responses.TokenizerInfo),
    HttpRoute("/health", operations.health, _GET, _OPERATIONS, responses.Status, poll=True),
    HttpRoute("/ready", operations.ready, _GET, _OPERATIONS, responses.Status, poll=True),
    HttpRoute(
        "/health_generate",
        operations.health_generate,
        _GET,
        _OPERATIONS,
        responses.Status,
        poll=True,
    ),
    HttpRoute("/status", status.status, _GET, _OPERATIONS, responses.EngineStatus, poll=True),
    HttpRoute("/metrics", operations.metrics, _GET, _OPERATIONS, poll=True),
    HttpRoute("/version", operations.version, _GET, _OPERATIONS, responses.Version),
    HttpRoute("/model_info", operations.model_info, _GET, _OPERATIONS, responses.ModelInfo),
    HttpRoute("/get_model_info", operations.model_info, _GET, _OPERATIONS, responses.ModelInfo),
    HttpRoute("/server_info", operations.server_info, _GET, _OPERATIONS, responses.ServerInfo),
    HttpRoute("/get_server_info", operations.server_info, _GET, _OPERATIONS, responses.ServerInfo),
    HttpRoute("/expert_load", operations.expert_load, _GET, _OPERATIONS, ExpertLoad),
    HttpRoute(
        "/reset_expert_load",
        operations.reset_expert_load,
        _POST,
        _OPERATIONS,
        responses.Done,
        admin=True,
    ),
    HttpRoute(
        "/abort_request", operations.abort_request, _POST, _OPERATIONS, responses.Done, AbortRequest
    ),
    HttpRoute(
        "/flush_cache", operations.flush_cache, _GET_POST, _OPERATIONS, responses.Done, admin=True
    ),
    HttpRoute(
        "/start_profile",
        operations.start_profile,
        _GET_POST,
        _OPERATIONS,
        responses.Done,
        ProfileRequest,
        admin=True,
    ),
    HttpRoute(
        "/stop_profile", operations.stop_profile, _GET_POST, _OPERATIONS, responses.Done, admin=True
    ),
    *(HttpRoute(path, refusal(path), _POST, _OPENAI, responses.ErrorBody) for path in REASONS),
)
