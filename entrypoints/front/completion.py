"""Results of finished sequences of the offline engine, and the progress bar that counts them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from glowplug.core.step.messages import Logprobs
from glowplug.entrypoints.front.chat.answers import AnswerForm, AnswerParts
from glowplug.entrypoints.front.delta import Delta, VerifiedDrafts
from glowplug.entrypoints.front.front import CheckedRequest


@dataclass
class Completion:
    """One finished sequence.

    Attributes:
        prompt_token_ids: token ids of the prompt.
        index: number of the completion among the ``n`` of its prompt, from 0.
        text: generated text, special tokens removed unless ``skip_special_tokens=False``; ""
            without a tokenizer.
        token_ids: generated ids, including the eos that ended the sequence.
        finish_reason: "stop", "tool_calls", "length", "abort", "timeout" or "error".
        stop_reason: the stop string or token id that matched.
        logprobs: log-probabilities of ``token_ids``; None unless requested.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on; None unless
            requested.
        cached_tokens: prompt tokens found in the prefix cache.
        drafts: the drafts of its verify steps; None if the engine drafts nothing.
        message: answer of a chat as a message in the form of OpenAI's chat API, with "content",
            "reasoning_content" and "tool_calls" where there are some; {} for other completions.
        error: message if ``finish_reason`` is "error".
        choices: all ``n`` completions of the prompt, this one first. Only the first completion of a
            prompt has the list; the others have [].
    """

    prompt_token_ids: list[int]
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int = 0
    drafts: VerifiedDrafts | None = None
    message: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    choices: list[Completion] = field(default_factory=list, repr=False)

    def take(self, delta: Delta) -> None:
        """Add the sequence's next delta to the completion."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.cached_tokens = delta.cached_tokens
        self.drafts = delta.drafts
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = Logprobs([], [], [])
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error

    def parse(self, form: AnswerForm) -> None:
        """Parse the text of a chat's answer into ``message``."""
        parser = form.start()
        whole = Delta(self.text, self.token_ids, finish_reason=self.finish_reason)
        parts = AnswerParts()
        parts.add(parser.feed(whole))
        self.finish_reason = parser.finish_reason(whole)
        self.message = parts.message()


def choices_of(
    first: Completion, request: CheckedRequest
) -> Iterator[tuple[Completion, CheckedRequest]]:
    """Yield (empty completion, request) for each of a prompt's ``n`` choices.

    Each completion is added to ``first.choices``. A given seed is incremented for each choice.

    Args:
        first: completion of the first choice.
        request: the prompt with the parameters of all choices.
    """
    seed = request.params.seed
    for index in range(request.params.n):
        choice = Completion(first.prompt_token_ids, index) if index else first
        first.choices.append(choice)
        params = request.params if seed is None else request.params.replace(seed=seed + index)
        yield choice, replace(request, params=params)


class ProgressBar:
    """A bar of tqdm, on standard error, that counts finished sequences and shows tokens/s.

    Args:
        total: number of sequences.
        make: ``tqdm`` or a function with its arguments.
    """

    def __init__(self, total: int, make: Callable[..., Any]) -> None:
        self._bar = make(total=total, desc="Generating", unit="seq", dynamic_ncols=True)
        self._started = time.perf_counter()
        self._prompt_tokens = self._output_tokens = 0

    def count(self, completion: Completion) -> None:
        """Add a finished sequence."""
        self._prompt_tokens += len(completion.prompt_token_ids)
        self._output_tokens += len(completion.token_ids)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"prompt {self._prompt_tokens / seconds:.1f} tokens/s, "
            f"output {self._output_tokens / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def progress_bar(
    use_tqdm: bool | Callable[..., Any] | None, total: int
) -> Iterator[ProgressBar | None]:
    """Show a bar for ``total`` sequences within the context, or give None without one.

    Args:
        use_tqdm: as for ``LLM.generate``: None shows a bar if standard error is a terminal; a
            function is called in place of ``tqdm``.
        total: number of sequences.
    """
    make = use_tqdm if callable(use_tqdm) else None
    if make is None and (sys.stderr.isatty() if use_tqdm is None else use_tqdm):
        from tqdm import tqdm

        make = tqdm
    bar = ProgressBar(total, make) if make is not None else None
    try:
        yield bar
    finally:
        if bar is not None:
            bar.close()
