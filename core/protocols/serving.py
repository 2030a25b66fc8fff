"""The engine as routes of plugins use it: ``engine`` of the hook ``extend_app``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams


@dataclass(frozen=True)
class OutputPart:
    """New output of a sequence; the last part has ``finish_reason``.

    Attributes:
        text: new text, without stop strings; "" without a tokenizer.
        token_ids: new tokens, which may be ahead of ``text``.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it runs.
        error: the message of an end with "error".
        error_code: its code.
        prompt_tokens: number of tokens of the prompt.
        output_tokens: number of tokens so far.
        cached_tokens: tokens of the prompt found in the prefix cache.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class EngineHandle(Protocol):
    """The running engine and the server around it, for routes of plugins.

    Use it on the server's event loop. Requests, ``stats`` and ``tokenize`` work from the first
    request on, the other methods while ``extend_app`` runs.

    Attributes:
        plan: the plan.
    """

    plan: EnginePlan

    def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        admission: Admission = DEFAULT_ADMISSION,
    ) -> AsyncIterator[OutputPart]:
        """Submit one sequence and yield its output; leaving the iteration aborts the sequence.

        Args:
            prompt: a text or token ids.
            params: sampling parameters, with ``n`` 1.
            request_id: id for the log and ``abort``; "" for a new one.
            admission: priority, prefix-cache salt and limits in time.

        Raises:
            RequestError: the request cannot be served. Raised from a route, it becomes an answer
                in OpenAI's form.
        """
        ...

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        admission: Admission = DEFAULT_ADMISSION,
    ) -> OutputPart:
        """Run one sequence to its end and return its whole output; arguments as in ``stream``.

        Raises:
            RequestError: the request cannot be served, or ended with an error.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End the sequences of a request; an unknown id is ignored."""
        ...

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        ...

    def stats(self) -> Stats:
        """Return the latest statistics."""
        ...

    def admin(self, path: str) -> None:
        """Have the routes of this exact path need the admin key."""
        ...

    def on_start(self, act: Callable[[], Awaitable[None]]) -> None:
        """Await ``act()`` before the engine starts and the server takes requests."""
        ...

    def on_stop(self, act: Callable[[], Awaitable[None]]) -> None:
        """Await ``act()`` after the last request; in reverse order of registration."""
        ...

    def mount(self, path: str, app: Any, *, admin: bool = False) -> None:
        """Mount an ASGI app under ``path``; the server checks the key of each request first.

        Args:
            path: beginning of the paths, such as "/dashboard".
            app: the ASGI app; it gets HTTP requests only.
            admin: the paths need the admin key.
        """
        ...
