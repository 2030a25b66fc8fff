"""Validation of the offline engine's arguments: texts, token ids, conversations, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import RequestError
from glowplug.core.step.request import SamplingParams

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
Message = dict[str, Any]


def prompts(given: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Convert one prompt or several to a list, in which each prompt is a text or token ids.

    Raises:
        RequestError: ``given`` is neither a prompt nor a sequence of prompts.
    """
    if isinstance(given, str) or _is_ids(given):
        return [prompt(given)]
    return [prompt(one) for one in _as_list(given, "a prompt")]


def prompt(given: Any) -> str | list[int]:
    """Return a prompt: a text unchanged, token ids as a list of int.

    Raises:
        RequestError: ``given`` is neither a text nor token ids.
    """
    if isinstance(given, str):
        return given
    ids = _as_list(given, "a prompt")
    # the common case, checked without a Python loop over the ids
    if set(map(type, ids)) == {int}:
        return ids
    if any(isinstance(token, bool) for token in ids):
        raise RequestError(
            "a prompt is a text or a list of token ids, got a list with a boolean", param="prompt"
        )
    try:
        return [index(token) for token in ids]
    except TypeError as error:
        raise RequestError(
            f"a prompt is a text or a list of token ids: {error}", param="prompt"
        ) from None


def is_prompt(given: Any) -> bool:
    """Return whether ``given`` is a prompt (a text or token ids), not a conversation."""
    return isinstance(given, str) or _is_ids(given)


def conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Convert one conversation or several to a list of conversations.

    Raises:
        RequestError: a conversation is not a list of messages.
    """
    found = _as_list(given, "a conversation")
    return (
        [messages(found)]
        if found and isinstance(found[0], dict)
        else [messages(one) for one in found]
    )


def messages(given: Any) -> list[Message]:
    """Convert a conversation to messages whose content is text; content parts are joined.

    Raises:
        RequestError: a message is malformed or has content other than text; the error names the
            message.
    """
    found = _as_list(given, "a conversation")
    if not found:
        raise RequestError("a conversation needs at least one message", param="messages")
    return [_message(one, f"messages.{i}") for i, one in enumerate(found)]


def params_for(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return sampling parameters for each of ``count`` prompts.

    ``params``: one for all prompts, one for each, or None for the defaults.

    Raises:
        RequestError: the number or type of the parameters is wrong.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"expected SamplingParams, or a list with one for each prompt; got "
                f"{type(one).__name__}",
                param="params",
            )
    if len(each) != count:
        raise RequestError(f"{count} prompts but {len(each)} SamplingParams", param="params")
    return each


def _is_ids(given: Any) -> bool:
    """Return whether ``given`` is one list or array of token ids."""
    if isinstance(given, np.ndarray):
        return given.ndim == 1
    return (
        isinstance(given, list | tuple | range)
        and bool(given)
        and isinstance(given[0], int | np.integer)
    )


def _as_list(given: Any, what: str) -> list[Any]:
    """Convert a sequence, an array or a tensor to a list. ``what``: its name in the error."""
    if isinstance(given, list | tuple | range):
        return list(given)
    tolist = getattr(given, "tolist", None)  # arrays and tensors
    found = tolist() if callable(tolist) else None
    if isinstance(found, list):
        return found
    raise RequestError(
        f"{what} cannot be of type {type(given).__name__}; pass a list", param="prompt"
    )


def _message(given: Any, where: str) -> Message:
    """Convert a message to one whose content is text. ``where``: its field, for errors."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RequestError(f"{where}: a message is a dict with a role and content", param=where)
    content = given.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            raise RequestError(
                f"{where}.content: this model takes text only", param=f"{where}.content"
            )
        return {**given, "content": "".join(part["text"] for part in content)}
    if not isinstance(content, str) and not (content is None and given.get("tool_calls")):
        raise RequestError(
            f"{where}.content: expected text, got {type(content).__name__}",
            param=f"{where}.content",
        )
    return given
