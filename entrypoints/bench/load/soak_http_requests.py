"""The random HTTP requests of a soak: each route, whole and streamed, good and bad."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

TOKENS_MAX = 16  #: longest answer in tokens
QUESTION = "What is 17 + 25?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
#: kind of a request -> weight
KINDS = {
    "whole": 6,
    "streamed": 6,
    "left early": 2,
    "left in the stream": 4,
    "schema": 2,
    "new schema": 2,
    "bad grammar": 1,
    "choices": 2,
    "reasoning": 2,
    "tools": 2,
    "read slowly": 1,
    "wrong field": 2,
    "bad JSON": 1,
    "too long": 1,
    "unknown route": 1,
}
ROUTES = ("chat", "completions", "generate", "responses", "messages")
BAD_JSON = (b"", b"{", b"[1]", b'{"messages": NaN}', b"\xff\xfe", b'{"a":' * 99)


@dataclass(frozen=True)
class WantedExchange:
    """One HTTP request of a soak with the expected reaction of the server.

    Attributes:
        kind: key of ``KINDS``.
        path: the route.
        body: bytes of the body.
        status: expected status.
        read: bytes of the answer after which the connection is closed; None: all are read.
        pause: seconds between two reads.
        ends: bytes with which a complete answer ends.
    """

    kind: str
    path: str
    body: bytes
    status: int = 200
    read: int | None = None
    pause: float = 0.0
    ends: bytes = b""


class ExchangeMix:
    """Source of random requests.

    Args:
        rng: random numbers.
        context: context length of the server in tokens.
    """

    def __init__(self, rng: random.Random, context: int) -> None:
        self._rng = rng
        self._context = context

    def next(self) -> WantedExchange:
        """Return the next random request."""
        rng = self._rng
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "bad JSON":
            return WantedExchange(kind, "/v1/chat/completions", rng.choice(BAD_JSON), 400)
        if kind == "unknown route":
            return WantedExchange(kind, f"/v1/route-{rng.randrange(10**6)}", b"{}", 404)
        if kind == "left early":
            return self._made(kind, rng.choice(ROUTES), {"stream": rng.random() < 0.5}, read=0)
        if kind in ("new schema", "bad grammar", "choices", "reasoning"):
            return self._new(kind)
        if kind in ("schema", "tools", "wrong field", "too long"):
            return self._special(kind)
        if kind == "left in the stream":
            return self._streamed(kind, read=rng.randint(1, 2000))
        if kind == "read slowly":
            return self._streamed(kind, pause=0.02)
        if kind == "streamed":
            return self._streamed(kind)
        return self._made(kind, rng.choice(ROUTES), {})

    def _special(self, kind: str) -> WantedExchange:
        """Return a request with a schema or tools, or one that must be refused."""
        if kind == "schema":
            return self._made(kind, "chat", _schema(SCHEMA))
        if kind == "tools":
            return self._made(kind, "chat", {"tools": [TOOL], "tool_choice": "required"})
        if kind == "wrong field":
            route = self._rng.choice(("chat", "completions", "responses", "messages"))
            return self._made(kind, route, {"temperature": -1}, status=400)
        return self._made(kind, "completions", {"prompt": [5] * (self._context + 1)}, status=400)

    def _new(self, kind: str) -> WantedExchange:
        """Return a request with a grammar that no other one has, several choices, or reasoning."""
        rng = self._rng
        if kind == "bad grammar":
            return self._made(kind, "chat", self._bad_grammar(), status=400)
        fields: dict[str, Any] = {"stream": rng.random() < 0.5}
        if kind == "choices":
            fields["n"] = rng.randint(2, 4)
        if kind == "reasoning":
            fields["chat_template_kwargs"] = {"thinking": True}
        if kind == "new schema" or rng.random() < 0.3:
            fields |= _schema(self._schema())
        return self._made(kind, "chat", fields, ends=b"[DONE]" if fields["stream"] else b"")

    def _schema(self) -> dict[str, Any]:
        """Return a schema with random names, so that no cache has its grammar."""
        rng = self._rng
        names = [f"key{rng.randrange(10**9)}" for _ in range(rng.randint(1, 4))]
        kinds = ({"type": "integer"}, {"type": "string", "maxLength": 4}, {"enum": names})
        return {
            "type": "object",
            "properties": {name: rng.choice(kinds) for name in names},
            "required": names,
            "additionalProperties": False,
        }

    def _bad_grammar(self) -> dict[str, Any]:
        """Return fields with a grammar that cannot be compiled."""
        number = self._rng.randrange(10**9)
        bad: tuple[dict[str, Any], ...] = (
            {"structured_outputs": {"regex": f"({number}"}},
            {"structured_outputs": {"grammar": f"root ::= missing{number}"}},
            _schema({"type": f"kind{number}"}),
        )
        return self._rng.choice(bad)

    def _streamed(self, kind: str, read: int | None = None, pause: float = 0.0) -> WantedExchange:
        route = self._rng.choice(ROUTES)
        ends = {"responses": b"", "messages": b"message_stop"}.get(route, b"[DONE]")
        return self._made(kind, route, {"stream": True}, read=read, pause=pause, ends=ends)

    def _made(self, kind: str, route: str, fields: dict[str, Any], **more: Any) -> WantedExchange:
        path, body = BODIES[route](self._prompt(), self._tokens(), self._rng.random() * 1.5)
        return WantedExchange(kind, path, orjson.dumps({**body, **fields}), **more)

    def _tokens(self) -> int:
        """Return a random length from 1 to ``TOKENS_MAX``, log-uniformly distributed."""
        return round(math.exp(self._rng.random() * math.log(TOKENS_MAX)))

    def _prompt(self) -> str:
        count = self._rng.randint(0, self._context // 64)
        return " ".join([QUESTION, *(str(self._rng.randrange(100)) for _ in range(count))])


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the field of a chat whose answer has to match ``schema``."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": form}


def _chat(prompt: str, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": temperature}
    return "/v1/chat/completions", body


def _completions(prompt: str, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": temperature,
        "n": 1 + tokens % 3,
    }


def _generate(prompt: str, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
    params = {"max_new_tokens": tokens, "temperature": temperature}
    return "/generate", {"text": prompt, "sampling_params": params}


def _responses(prompt: str, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
    # NOTE: stored answers take memory up to a limit of the server; that is no growth.
    return "/v1/responses", {
        "input": prompt,
        "max_output_tokens": tokens,
        "temperature": temperature,
        "store": False,
    }


def _messages(prompt: str, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": min(1.0, temperature)}
    return "/v1/messages", {"model": "default", **body}


BODIES: dict[str, Callable[[str, int, float], tuple[str, dict[str, Any]]]] = {
    "chat": _chat,
    "completions": _completions,
    "generate": _generate,
    "responses": _responses,
    "messages": _messages,
}
