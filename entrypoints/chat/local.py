"""Answers of an engine in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.core.protocols import Piece
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.chat.session import ChatError, ChatPart, Message
from glowplug.entrypoints.chat.settings import ChatSettings
from glowplug.entrypoints.front.chat.answers import AnswerParser, answer_form
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.front.llm import LLM


class LocalChat:
    """The ``ChatEngine`` of an engine in this process.

    Args:
        config: keywords of ``LLM``.

    Raises:
        PlanRefused: the configuration cannot run.
        ChatError: the model has no chat template.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._llm = LLM(**config)
        self.label = f"{self._llm.plan.model} in this process"
        if self._llm.tokenizer is None or not self._llm.tokenizer.has_chat_template:
            self._llm.close()
            raise ChatError(f"{self._llm.plan.model} has no chat template, so it cannot chat")
        self._tokenizer = self._llm.tokenizer

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[ChatPart, None, None]:
        thinking = settings.thinking
        names = () if thinking is None else ("thinking", "enable_thinking")
        template: dict[str, Any] = dict.fromkeys(names, thinking)
        plain = [{"role": one["role"], "content": one["content"]} for one in messages]
        try:
            params = SamplingParams(**{"max_tokens": None, **settings.sampling()})
            parser = self._parser(Turn(plain, template=template), params)
            deltas: Any = self._llm.stream(plain, params, **template)
            with closing(deltas), deferred_interrupt() as interrupted:
                for delta in deltas:
                    yield _part(parser.feed(delta), delta.finish_reason)
                    if delta.finish_reason == "error":
                        raise ChatError(delta.error or "the answer failed")
                    if interrupted.is_set() and delta.finish_reason is None:
                        raise KeyboardInterrupt
        except RequestError as error:
            raise ChatError(str(error)) from None

    def _parser(self, turn: Turn, params: SamplingParams) -> AnswerParser:
        """Return the parser of a turn's answer."""
        request = turn.output_request(turn.prompt_text(self._tokenizer))
        return answer_form(request, self._llm.output_parsers, params).start()

    def close(self) -> None:
        self._llm.close()


def _part(pieces: Sequence[Piece], finish: str | None) -> ChatPart:
    """Return the pieces of an answer without tools as one part."""
    texts = {"reasoning": "", "content": ""}
    for piece in pieces:
        texts[piece.kind] += piece.text
    return ChatPart(**texts, finish=finish)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Set the yielded event on SIGINT, instead of raising KeyboardInterrupt within a step.

    NOTE: the engine runs its steps in this thread, and an exception in the middle of one would end
    the engine.
    """
    found = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        found.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
