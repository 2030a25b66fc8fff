"""Checks of the fields of ``/v1/responses``: features without support are refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.generate.params import refuse, unsupported
from glowplug.entrypoints.server.protocol.response_request import ResponseRequest

LOGPROBS = "message.output_text.logprobs"  #: value of ``include`` for log-probabilities
ENCRYPTED = "reasoning.encrypted_content"  #: value of ``include`` for reasoning as one opaque text

#: refused field -> reason; None, false, "" and empty lists or objects are accepted
REFUSED: Mapping[str, str] = {
    "background": "is not supported: a response ends with its request; use stream",
    "conversation": "is not supported: use previous_response_id",
    "prompt": "is not supported: this server stores no prompts; send instructions and input",
    "max_tool_calls": "limits hosted tools, and this server has none",
    "context_management": "is not supported: use truncation",
    "moderation": "is not supported: this server has no moderation",
    "access_programs": "is not supported",
    "image": "is refused: this model takes text only",
    "prompt_cache_options": "is not supported: prefixes are cached without options",
    "max_tokens": "is a field of /v1/completions: use max_output_tokens",
    "max_completion_tokens": "is a field of chat completions: use max_output_tokens",
    "messages": "is a field of chat completions: use input",
    "response_format": "is a field of chat completions: use text.format",
    "return_token_ids": "is not supported on this route",
    "return_tokens_as_token_ids": "is not supported on this route",
}


def check_fields(body: ResponseRequest) -> dict[str, Any]:
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
        raise unsupported("n", "is not supported: a response has one answer")
    if body.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", "must be auto or default: this server has one tier")
    if body.stream_options is not None:
        if not body.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if body.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "is not supported")
    _check_text(body)
    _check_reasoning(body)
    for value in body.include or ():
        if value not in (LOGPROBS, ENCRYPTED):
            raise unsupported(
                "include", f"has {value[:64]!r}; supported are {LOGPROBS} and {ENCRYPTED}"
            )
    return {name: value for name, value in extras.items() if name not in REFUSED}


def _check_text(body: ResponseRequest) -> None:
    """Check the value of ``text``."""
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "must be medium: the model has no such setting")


def _check_reasoning(body: ResponseRequest) -> None:
    """Check the value of ``reasoning``."""
    given = body.reasoning
    if given is None:
        return
    for name in ("summary", "generate_summary"):
        if getattr(given, name) not in (None, "auto"):
            raise unsupported(
                f"reasoning.{name}", "must be auto: reasoning is returned in full, not summarised"
            )
    refuse(given.extras(), {"mode": "is not supported", "context": "is not supported"})


def logprobs_of(body: ResponseRequest) -> int | None:
    """Return the number of alternatives that log-probabilities have; None: not requested."""
    if LOGPROBS not in (body.include or ()) and not body.top_logprobs:
        return None
    return body.top_logprobs or 0
