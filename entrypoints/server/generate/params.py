"""Conversion of a request's fields to ``SamplingParams``.

Known fields that are not supported are refused with a reason, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.server.generate.structured import grammar_of
from glowplug.entrypoints.server.protocol.fields import SamplingFields
from glowplug.entrypoints.server.protocol.native import NativeSampling

#: accepted fields of the OpenAI API that have no effect
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prediction",
        "modalities",
        "verbosity",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "tool_choice",
        "spaces_between_special_tokens",
        "detokenize",
        "stream_interval",
    }
)

_NATIVE = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_UNSUPPORTED = "is not supported yet; leave it out"
_FORBIDDEN = "is refused: a request cannot bring code or tensors"

#: refused field -> reason; None, false, "" and empty lists or objects are accepted
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "prompt_embeds",
            "input_embeds",
            "custom_logit_processor",
            "logits_processors",
            "chat_template",
        ),
        _FORBIDDEN,
    ),
    **dict.fromkeys(
        (
            "tools",
            "functions",
            "function_call",
            "stop_regex",
            "documents",
            "thinking_token_budget",
            "bad_words",
            "logprob_token_ids",
            "prompt_logprobs",
            "truncate_prompt_tokens",
            "lora_path",
            "session_id",
            "session_params",
            "kv_transfer_params",
            "vllm_xargs",
            "custom_params",
            "return_hidden_states",
            "return_routed_experts",
            "use_beam_search",
            "web_search_options",
        ),
        _UNSUPPORTED,
    ),
    **dict.fromkeys(
        ("image_data", "audio_data", "video_data", "audio"),
        "is refused: this model takes text only",
    ),
    "suffix": "is not supported: this model completes at the end only",
}


def unknown_fields(extras: Mapping[str, Any]) -> list[str]:
    """Return the names of request fields in ``extras`` that the server does not know.

    Raises:
        RequestError: a field is known but not supported.
    """
    for name, value in extras.items():
        if name in REFUSED and value:
            raise RequestError(f"{name} {REFUSED[name]}", param=name, code="unsupported_parameter")
    _check_tool_choice(extras.get("tool_choice"))
    known = IGNORED | REFUSED.keys()
    return [name for name in extras if name not in known]


def _check_tool_choice(value: Any) -> None:
    """Raise RequestError if ``tool_choice`` needs tool calls."""
    if value not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice {_UNSUPPORTED}", param="tool_choice", code="unsupported_parameter"
        )


def openai_params(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of one choice (``n`` is 1).

    Raises:
        RequestError: a value is invalid or contradicts another field.
    """
    if max_tokens is not None and max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        allowed_token_ids=fields.allowed_token_ids,
        ext=fields.ext,
        grammar=grammar_of(fields),
        **_shared(fields, fields.min_tokens),
    )


def native_params(
    fields: NativeSampling, *, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of one sequence of the native route.

    ``max_new_tokens`` is 128 by default.
    """
    params = SamplingParams(
        max_tokens=128 if fields.max_new_tokens is None else fields.max_new_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens,
        include_stop_str_in_output=fields.no_stop_trim,
        ext=fields.ext,
        grammar=grammar_of(fields),
        **_shared(fields, fields.min_new_tokens),
    )
    return params.replace(seed=fields.sampling_seed) if params.seed is None else params


@contextmanager
def field_errors_at(place: str) -> Iterator[None]:
    """Make a RequestError in this context name its field as a native request does.

    Args:
        place: path of the sampling parameters in the body, such as "sampling_params.3"; "" leaves
            errors unchanged.
    """
    try:
        yield
    except RequestError as error:
        if not place or error.param in (None, "prompt"):
            raise
        name = _NATIVE.get(error.param, error.param)
        message = str(error).replace(error.param, name)
        whole = (
            f"{place}.{message}" if message.startswith(f"{name} ") else f"{place}.{name}: {message}"
        )
        raise RequestError(
            whole,
            code=error.code,
            param=f"{place}.{name}",
            status=error.status,
            confidential=error.confidential,
        ) from None


def _shared(fields: SamplingFields | NativeSampling, min_tokens: int | None) -> dict[str, Any]:
    """Return the values of ``SamplingParams`` that all routes set alike, except those of None."""
    given = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "logit_bias": _bias(fields.logit_bias),
        "seed": fields.seed,
        "stop": _strings(fields.stop),
        "stop_token_ids": fields.stop_token_ids,
        "ignore_eos": fields.ignore_eos,
        "min_tokens": min_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _strings(stop: str | list[str] | None) -> list[str] | None:
    """Convert stop strings, one or several, to a list; None stays None."""
    return [stop] if isinstance(stop, str) else stop


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Convert the keys of ``logit_bias`` to token ids; None if it is empty or not given."""
    if not bias:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias: {key[:32]!r} is not a token id", param="logit_bias")
    return {int(key): float(value) for key, value in bias.items()}


def choices(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return sampling parameters for each of ``n`` choices, the completions of one prompt.

    A given seed is incremented for each choice. The choices then differ, and each can be
    reproduced alone.
    """
    if params.seed is None:
        return [params] * n
    return [
        params.replace(seed=(params.seed + i + (1 << 63)) % (1 << 64) - (1 << 63)) for i in range(n)
    ]
