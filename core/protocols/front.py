"""What the front talks to: the executor of the ranks, and parsers of generated text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from glowplug.core.plan.plan import EnginePlan


@dataclass(frozen=True)
class Piece:
    """Parsed output: ``kind`` is "content", "reasoning" or "tool_call"; ``data`` holds a tool
    call's fields.
    """

    kind: str
    text: str
    data: Mapping[str, Any] | None = None


class OutputParser(Protocol):
    """Splits one generated text. One object a sequence, made by ``OutputParserFactory.start``."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class OutputParserFactory(Protocol):
    def start(self, prompt_tail: str, thinking: bool | None = None) -> OutputParser:
        """``prompt_tail``: the last characters of the rendered prompt (it may already hold the
        opening tag).
        """
        ...


class Executor(Protocol):
    """Runs the ranks. The only object the front talks to; messages are bytes (see
    ``core/step/messages.py``).

    Attributes:
        leads: the front runs here. False: another host has it; here only call ``start``, then
            ``outputs`` until it raises.
    """

    leads: bool

    def start(self, plan: EnginePlan) -> None:
        """Spawn, load, warm up; returns when every rank is ready. EngineDead with rank, phase and
        reason otherwise.
        """
        ...

    def submit(self, data: bytes) -> None: ...

    def outputs(self, timeout: float | None) -> bytes | None:
        """Next frame from the engine, or None after ``timeout`` seconds.

        EngineDead when a rank has failed, with rank, phase and reason; EngineStopped after
        ``stop``.
        """
        ...

    def stop(self) -> None:
        """End every rank. Idempotent."""
        ...
