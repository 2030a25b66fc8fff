"""Checks of headers and fields of ``/v1/messages``; features without support are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastapi import Request

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.generate.params import refuse, unsupported
from glowplug.entrypoints.server.protocol.messages import CountRequest, MessagesRequest

FIRST_VERSION = "2023-06-01"  #: the oldest version with the events that streams have here
_VERSION = re.compile(r"\d{4}-\d\d-\d\d")

#: refused field -> reason; None, false, "" and empty lists or objects are accepted
REFUSED: Mapping[str, str] = {
    "container": "is refused: this server runs no code",
    "mcp_servers": "is refused: this server makes no outbound connections",
    "context_management": "is not supported: the conversation is used as it is sent",
    "diagnostics": "is not supported",
    "inference_geo": "is not supported",
    "fallbacks": "is not supported: this server has one model",
    "user_profile_id": "is not supported",
    "workspace_id": "is not supported",
    "output_format": "is an older name: use output_config.format",
    "stop": "is a field of chat completions: use stop_sequences",
    "response_format": "is a field of chat completions: use output_config.format",
    "return_token_ids": "is not supported on this route",
    "return_tokens_as_token_ids": "is not supported on this route",
    "stream_options": "is not supported on this route: every stream ends with the usage",
}
#: fields that change nothing: prefixes are cached without marks, and speed has one value
WITHOUT_EFFECT = frozenset({"cache_control", "speed"})


def check_version(request: Request) -> None:
    """Check the header ``anthropic-version``. A request without it is accepted.

    Raises:
        RequestError: it is no date, or older than the supported format of streams.
    """
    given = request.headers.get("anthropic-version")
    if given is not None and not (_VERSION.fullmatch(given) and given >= FIRST_VERSION):
        raise RequestError(
            f"anthropic-version must be a date from {FIRST_VERSION} on", param="anthropic-version"
        )


def check_fields(body: CountRequest) -> dict[str, object]:
    """Check the fields that have only some of their published values here.

    Returns:
        The fields that the body's model does not declare and that have no known effect.

    Raises:
        RequestError: a field or value has no support.
    """
    extras = body.extras()
    declared = {name: getattr(body, name) for name in REFUSED if name in type(body).model_fields}
    refuse({**extras, **declared}, REFUSED)
    if body.n not in (None, 1):
        raise unsupported("n", "is not supported: a message is one answer")
    if extras.get("speed") not in (None, "standard"):
        raise unsupported("speed", "must be standard: this server has one")
    _check_thinking(body)
    _check_format(body)
    return {name: extras[name] for name in extras if name not in {*REFUSED, *WITHOUT_EFFECT}}


def _check_thinking(body: CountRequest) -> None:
    given = body.thinking
    if given is None:
        return
    if given.type not in ("enabled", "disabled", "adaptive"):
        raise unsupported("thinking.type", "must be enabled, disabled or adaptive")
    if (given.type == "enabled") != (given.budget_tokens is not None):
        raise RequestError(
            "thinking.budget_tokens belongs to the type enabled, which needs it",
            param="thinking.budget_tokens",
        )
    most = body.max_tokens if isinstance(body, MessagesRequest) else None
    if given.budget_tokens is not None and most is not None and given.budget_tokens >= most:
        raise RequestError(
            "thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens"
        )


def _check_format(body: CountRequest) -> None:
    given = body.output_config.format if body.output_config is not None else None
    if given is None:
        return
    if given.get("type") != "json_schema" or given.get("schema") is None:
        raise RequestError(
            "output_config.format must be of type json_schema and have a schema",
            param="output_config.format",
        )
