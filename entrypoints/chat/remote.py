"""Answers of a running OpenAI server."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.http_stream import ServerTarget
from glowplug.entrypoints.chat.session import ChatError, ChatPart, Message
from glowplug.entrypoints.chat.settings import ChatSettings
from glowplug.entrypoints.evaluation.options import Server
from glowplug.entrypoints.evaluation.server import INSPECT_SECONDS, ServerAnswers, message_of

CONNECT_SECONDS = 10.0
ERROR_BYTES = 1 << 20  #: most bytes that are read of an error


class RemoteChat:
    """The ``ChatEngine`` of a running server.

    Raises:
        ValueError: the server cannot be reached, refuses the key or serves no model.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._model = ServerAnswers(server, INSPECT_SECONDS).model
        self.label = f"{self._model} at {server.base_url}"

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[ChatPart, None, None]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": one["role"], "content": one["content"]} for one in messages],
            "stream": True,
            **settings.sampling(),
        }
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"thinking": settings.thinking}
        connection, prefix = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(None)
            path = prefix + "/v1/chat/completions"
            connection.request("POST", path, orjson.dumps(body), self._headers())
            response = connection.getresponse()
            if response.status != 200:
                text = message_of(response.read(ERROR_BYTES))
                raise ChatError(f"{text} (status {response.status})")
            yield from answer_parts(response)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ChatError(f"{self._server.base_url} does not answer: {reason}") from None
        finally:
            connection.close()

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        """Return a connection that is not open yet, and the path prefix of the server."""
        host, port, secure, prefix = ServerTarget(self._server.base_url).address()
        if not secure:
            return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS), prefix
        tls = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=tls), prefix

    def _headers(self) -> dict[str, Any]:
        headers: dict[str, Any] = {"Content-Type": "application/json"}
        if self._server.api_key:
            headers["Authorization"] = f"Bearer {self._server.api_key}".encode()
        return headers

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""


def answer_parts(lines: Iterable[bytes]) -> Generator[ChatPart, None, None]:
    """Yield the parts of an answer from the lines of a stream of server-sent events.

    Raises:
        ChatError: an event has an error, or the stream ends before ``[DONE]``.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise ChatError("the server sent an event that is not JSON") from None
        if event.get("error"):
            raise ChatError(message_of(data))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            yield ChatPart(reasoning, delta.get("content") or "", choice.get("finish_reason"))
    raise ChatError("the connection broke off before the end of the answer")
