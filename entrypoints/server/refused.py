"""Routes of other servers that this one refuses, with the reason.

The status is 400 and not 501, because clients repeat requests that are answered 5xx.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response

from glowplug.core.errors import RequestError

_NO_EMBEDDINGS = "a model that generates text has no embeddings"
_NO_SCORES = (
    "a model that generates text has no scores of pairs of texts; for the probabilities of a "
    "prompt's tokens use v1/completions with echo, logprobs and max_tokens 0"
)

#: path -> reason
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/encode"), _NO_EMBEDDINGS),
    **dict.fromkeys(
        ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify"), _NO_SCORES
    ),
}


def refusal(path: str) -> Callable[[], Awaitable[Response]]:
    """Return the endpoint that refuses every request for ``path``."""

    async def refuse() -> Response:
        raise RequestError(
            f"{path.removeprefix('/')} is not offered: {REASONS[path]}", code="unsupported_route"
        )

    return refuse
