"""The output of a sequence as the front returns it: new text and tokens, and the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from glowplug.core.step.messages import Logprobs


class Times(NamedTuple):
    """Seconds that a sequence spent in each phase; None: the phase was not reached.

    Attributes:
        queue: from arrival in the engine to admission.
        prefill: from admission to the first token, preemptions included.
        decode: from the first token to the last, preemptions included.
    """

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None

    def longest(self, other: Times) -> Times:
        """Return the longer time of each phase."""
        pairs = zip(self, other, strict=True)
        return Times(*(max((t for t in pair if t is not None), default=None) for pair in pairs))


class VerifiedDrafts(NamedTuple):
    """The drafts that a sequence's verify steps have had.

    Attributes:
        steps: verify steps: steps in which the sequence decoded with drafts.
        drafted: drafts verified in them.
        accepted: drafts accepted in them that are part of the output.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, drafted: int, accepted: int) -> VerifiedDrafts:
        """Return the drafts after one more verify step."""
        return VerifiedDrafts(self.steps + 1, self.drafted + drafted, self.accepted + accepted)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens gained by a verify step; None without one."""
        return 1 + self.accepted / self.steps if self.steps else None


@dataclass(slots=True)
class Delta:
    """New output of one sequence, from one step or several. The last delta has ``finish_reason``.

    Attributes:
        text: new text, without stop strings; incomplete UTF-8 is held back.
        token_ids: tokens committed since the last delta (they may be ahead of ``text``).
        logprobs: log-probabilities of ``token_ids``; None unless requested.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, in the first
            delta; None unless requested.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while the sequence
            runs.
        stop_reason: the stop string or token id that ended the sequence.
        error, error_code: set when ``finish_reason`` is "error".
        cached_tokens, prompt_tokens, output_tokens: counts so far.
        drafts: its drafts so far; None if the engine drafts nothing.
        times: seconds of each phase, in the last delta.
        more: the next delta is available already, because the reader is behind the engine.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafts: VerifiedDrafts | None = None
    times: Times = Times()
    more: bool = False

    def merge(self, later: Delta) -> None:
        """Add ``later``, the sequence's next delta, to this one."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.extend(later.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.error_code = later.error_code
        self.cached_tokens = later.cached_tokens
        self.output_tokens = later.output_tokens
        self.drafts = later.drafts
        self.times = later.times
