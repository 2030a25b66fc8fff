"""Hooks of schemathesis that thin out generated bodies, so that more of them reach the engine.

A body with every optional field is refused for its contradictions, and one without a text for
that. Three in ten bodies stay as they are.
"""

from __future__ import annotations

import random
from typing import Any

import schemathesis

OPTIONAL = 3  #: optional fields that remain in a body, at most
VOCABULARY = 2048
PLAIN = [{"role": "user", "content": "What is 17 + 25?"}]
#: field of a request -> value if the generated body has none
NEEDED = {
    "/v1/chat/completions": ("messages", PLAIN),
    "/v1/messages": ("messages", PLAIN),
    "/v1/responses": ("input", "What is 17 + 25?"),
    "/v1/completions": ("prompt", "What is 17 + 25?"),
    "/generate": ("text", "What is 17 + 25?"),
    "/tokenize": ("prompt", "two words"),
    "/v1/tokenize": ("prompt", "two words"),
    "/abort_request": ("abort_all", True),
}
#: required fields, and those that are alternatives to ``NEEDED``
KEPT = {"messages", "input", "tokens", "sampling_params", "max_tokens"}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Keep a few of the optional fields, chosen by the body itself."""
    if not isinstance(body, dict):
        return body
    rng = random.Random(repr(body))
    if rng.random() < 0.3:
        return body
    kept = _thinned(body, rng)
    if "model" in kept and rng.random() < 0.9:
        kept["model"] = "default"
    field, value = NEEDED.get(context.operation.path, ("", None))
    if "messages" in kept and rng.random() < 0.5:
        kept["messages"] = PLAIN
    if field and not any(kept.get(name) for name in (field, "input_ids", "messages")):
        kept[field] = value
    if isinstance(kept.get("sampling_params"), dict):
        kept["sampling_params"] = _thinned(kept["sampling_params"], rng)
    elif kept.get("text") == value:
        kept.pop("sampling_params", None)
    for name in ("tokens", "input_ids", "prompt"):
        if isinstance(kept.get(name), list):
            kept[name] = [_id(one) for one in kept[name]]
    return kept


def _thinned(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return ``body`` with a few of its optional fields."""
    optional = [name for name in body if name not in KEPT and name != "model"]
    kept = set(rng.sample(optional, min(len(optional), rng.randint(0, OPTIONAL))))
    return {name: value for name, value in body.items() if name in kept or name not in optional}


def _id(value: Any) -> Any:
    """Return an id of the vocabulary for an integer, other values as they are."""
    plain = isinstance(value, int) and not isinstance(value, bool)
    return value % VOCABULARY if plain and value >= 0 else value
