"""Log-probabilities in the formats of the chat, completions and native routes."""

from __future__ import annotations

from typing import Any

from glowplug.core.step.messages import Logprobs
from glowplug.entrypoints.server.generate.token_names import TokenNames

LOGPROB_MIN = -9999.0  #: replaces minus infinity, which JSON cannot represent


def chat_logprobs(
    names: TokenNames, tokens: list[int], scores: Logprobs, top: int, as_ids: bool
) -> list[dict[str, Any]]:
    """Return the entries of ``choices[].logprobs.content`` of a chat response.

    Args:
        names: names and bytes of tokens.
        tokens: generated token ids.
        scores: log-probabilities of ``tokens``.
        top: number of alternatives per token.
        as_ids: write tokens as ``token_id:N``.
    """
    return [
        {
            **_entry(names, token, scores.token[i], as_ids),
            "top_logprobs": [
                _entry(names, id, value, as_ids)
                for id, value in zip(scores.top_ids[i][:top], scores.top[i][:top])
            ],
        }
        for i, token in enumerate(tokens[: len(scores.token)])
    ]


def _entry(names: TokenNames, token: int, value: float, as_id: bool) -> dict[str, Any]:
    return {
        "token": names.name(token, as_id),
        "logprob": max(value, LOGPROB_MIN),
        "bytes": list(names.bytes_of(token)),
    }


class CompletionLogprobs:
    """The builder of the object ``choices[].logprobs`` of ``/v1/completions``.

    Args:
        names: names and bytes of tokens.
        top: number of alternatives per token.
        as_ids: write tokens as ``token_id:N``.
        offset: first value of ``text_offset``, in characters.
    """

    def __init__(self, names: TokenNames, top: int, as_ids: bool, offset: int = 0) -> None:
        self._names = names
        self._top = top
        self._as_ids = as_ids
        self._offset = offset
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, tokens: list[int], scores: Logprobs) -> None:
        """Add the prompt's tokens.

        ``scores`` starts at the second token, since the first has no log-probability.
        """
        self._add(tokens[0], None, None)
        self.add(tokens[1:], scores)

    def add(self, tokens: list[int], scores: Logprobs) -> None:
        """Add generated tokens with their log-probabilities."""
        for i, token in enumerate(tokens[: len(scores.token)]):
            best = {
                self._names.name(id, self._as_ids): max(value, LOGPROB_MIN)
                for id, value in zip(scores.top_ids[i][: self._top], scores.top[i][: self._top])
            }
            best.setdefault(
                self._names.name(token, self._as_ids), max(scores.token[i], LOGPROB_MIN)
            )
            self._add(token, max(scores.token[i], LOGPROB_MIN), best)

    def _add(self, token: int, value: float | None, best: dict[str, float] | None) -> None:
        self._tokens.append(self._names.name(token, self._as_ids))
        self._token_logprobs.append(value)
        self._top_logprobs.append(best)
        self._offsets.append(self._offset)
        self._offset += len(self._names.text(token))

    def take(self) -> dict[str, Any]:
        """Return the ``logprobs`` object for the tokens added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken


NativeLogprobs = list[tuple[float | None, int, str | None]]


def native_logprobs(
    names: TokenNames, tokens: list[int], scores: Logprobs, text: bool
) -> NativeLogprobs:
    """Return ``[logprob, token id, text or null]`` for each token."""
    return [
        (max(value, LOGPROB_MIN), token, names.text(token) if text else None)
        for token, value in zip(tokens, scores.token)
    ]


def native_top(names: TokenNames, scores: Logprobs, top: int, text: bool) -> list[NativeLogprobs]:
    """Return the ``top`` alternatives of each token, in the form of :func:`native_logprobs`."""
    return [
        [
            (max(value, LOGPROB_MIN), id, names.text(id) if text else None)
            for id, value in zip(ids[:top], values[:top])
        ]
        for ids, values in zip(scores.top_ids, scores.top)
    ]
