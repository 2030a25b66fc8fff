"""Questions to an engine in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import RequestError
from glowplug.entrypoints.evaluation.questions import Answer, Question

if TYPE_CHECKING:
    from glowplug.core.step.request import SamplingParams
    from glowplug.entrypoints.front.delta import Delta
    from glowplug.entrypoints.front.front import Stream


@dataclass
class _Running:
    """A question that is being answered.

    Attributes:
        index: number of the question.
        started: when it was submitted, in seconds of ``time.perf_counter``.
        text: the text so far.
        tokens: number of tokens so far.
    """

    index: int
    started: float
    text: str = ""
    tokens: int = 0

    def take(self, delta: Delta) -> Answer | None:
        """Add a delta and return the answer if it was the last one."""
        self.text += delta.text
        self.tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return None
        seconds = time.perf_counter() - self.started
        if delta.finish_reason in ("stop", "length"):
            return Answer(self.text, self.tokens, seconds)
        return Answer(
            self.text, self.tokens, seconds, f"{delta.finish_reason}: {delta.error or 'no reason'}"
        )


class InProcessAnswers:
    """Answers of an engine in this process, which is closed at the end of the context.

    Attributes:
        label: name of the engine in results.
        model: the model's name.

    Raises:
        PlanRefused: the configuration cannot run.
        ValueError: the engine has no tokenizer.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from glowplug.entrypoints.front.llm import LLM

        self._llm = LLM(**config)
        self.model = str(config.get("model", "embedded"))
        self.label = f"{self.model} (plan {self._llm.plan.fingerprint})"
        if self._llm.tokenizer is None:
            self._llm.close()
            raise ValueError(f"{self.model} has no tokenizer, and questions are texts")
        self._tokenizer = self._llm.tokenizer

    def __enter__(self) -> InProcessAnswers:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()

    def run(
        self,
        questions: Sequence[Question],
        parallel: int,
        answers: MutableMapping[int, Answer],
        finished: Callable[[], None],
    ) -> None:
        """Put all questions to the engine; see ``ServerAnswers.run``."""
        waiting = deque(enumerate(questions))
        running: dict[Stream, _Running] = {}
        most = min(parallel, self._llm.plan.sizes.max_admitted)
        while waiting or running:
            while waiting and len(running) < most:
                index, question = waiting.popleft()
                one = _Running(index, time.perf_counter())
                try:
                    running[self._submitted(question)] = one
                except RequestError as error:
                    answers[index] = Answer(error=f"RequestError: {error}")
                    finished()
            for stream, answer in self._ended(running) if running else ():
                answers[running.pop(stream).index] = answer
                finished()

    def _submitted(self, question: Question) -> Stream:
        """Start to answer a question and return its stream.

        Raises:
            RequestError: the engine cannot answer the question.
        """
        prompt: str | list[int] = question.prompt
        if question.chat:
            messages = [{"role": "user", "content": question.prompt}]
            text = self._tokenizer.apply_chat_template(messages, **question.template)
            prompt = self._tokenizer.encode(text, add_special_tokens=False)
        return self._llm.submit(prompt, _params(question))

    def _ended(self, running: Mapping[Stream, _Running]) -> Iterator[tuple[Stream, Answer]]:
        """Wait for deltas, and yield the questions whose answers are complete."""
        for stream, delta in self._llm.poll():
            answer = running[stream].take(delta)
            if answer is not None:
                yield stream, answer


def _params(question: Question) -> SamplingParams:
    from glowplug.core.step.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=question.max_tokens, stop=list(question.stop))
