"""Responses of ``/generate`` in SGLang's format.

A response has one dict for each sequence. In a stream, each dict has all output so far.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from glowplug.entrypoints.front.delta import Delta, VerifiedDrafts
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.logprobs import (
    NativeLogprobs,
    native_logprobs,
    native_top,
)
from glowplug.entrypoints.server.protocol.native import GenerateRequest


@dataclass
class SequenceOutput:
    """The output of one sequence so far, from which each response is made."""

    id: str
    prompt: list[int]
    arrival: float = field(default_factory=time.monotonic)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: NativeLogprobs = field(default_factory=list)
    top: list[NativeLogprobs] = field(default_factory=list)
    input_scores: NativeLogprobs | None = None
    input_top: list[NativeLogprobs] | None = None


class NativeOutputs:
    """The outputs of all sequences of one request to SGLang's ``/generate``.

    Attributes:
        latest: latest response of each sequence.
    """

    def __init__(
        self, context: Context, request: GenerateRequest, ids: list[str], prompts: list[list[int]]
    ) -> None:
        self._names = context.names
        self._request = request
        self._with_text = bool(request.return_text_in_logprobs)
        self._top = request.top_logprobs_num or 0
        self._start = -1 if request.logprob_start_len is None else request.logprob_start_len
        self._outputs = [
            SequenceOutput(id, prompt) for id, prompt in zip(ids, prompts, strict=True)
        ]
        self.latest: list[dict[str, Any]] = [{} for _ in prompts]

    def add(self, index: int, delta: Delta) -> dict[str, Any]:
        """Add a delta of sequence ``index`` and return the sequence's response so far."""
        output = self._outputs[index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        if delta.logprobs is not None:
            output.scores += native_logprobs(
                self._names, delta.token_ids, delta.logprobs, self._with_text
            )
            output.top += native_top(self._names, delta.logprobs, self._top, self._with_text)
        if delta.prompt_logprobs is not None:
            self._take_prompt(output, delta)
        answer = {
            "text": output.text,
            "output_ids": output.token_ids,
            "meta_info": self._meta(output, delta),
        }
        self.latest[index] = answer
        return answer

    def _take_prompt(self, output: SequenceOutput, delta: Delta) -> None:
        """Store the log-probabilities of the prompt's tokens from ``logprob_start_len`` on.

        The first token of the prompt has no log-probability.
        """
        assert delta.prompt_logprobs is not None
        first = output.prompt[0]
        known = native_logprobs(
            self._names, output.prompt[1:], delta.prompt_logprobs, self._with_text
        )
        scores: NativeLogprobs = [
            (None, first, self._names.text(first) if self._with_text else None),
            *known,
        ]
        top: list[NativeLogprobs] = [
            [],
            *native_top(self._names, delta.prompt_logprobs, self._top, self._with_text),
        ]
        output.input_scores = scores[self._start :]
        output.input_top = top[self._start :]

    def _meta(self, output: SequenceOutput, delta: Delta) -> dict[str, Any]:
        """Return the object ``meta_info`` of a sequence's response."""
        meta: dict[str, Any] = {
            "id": output.id,
            "finish_reason": _finish(delta),
            "prompt_tokens": delta.prompt_tokens,
            "completion_tokens": delta.output_tokens,
            "cached_tokens": delta.cached_tokens,
            "e2e_latency": time.monotonic() - output.arrival,
        }
        if delta.drafts is not None and delta.drafts.drafted:
            meta |= _draft_meta(delta.drafts)
        if self._request.return_logprob:
            meta["output_token_logprobs"] = output.scores
            meta["input_token_logprobs"] = output.input_scores or []
            if self._top:
                meta["output_top_logprobs"] = output.top
                meta["input_top_logprobs"] = output.input_top or []
        return meta


def _draft_meta(drafts: VerifiedDrafts) -> dict[str, Any]:
    """Return the fields of ``meta_info`` about drafts. ``drafts`` has at least one verify step."""
    return {
        "spec_accept_rate": drafts.accepted / drafts.drafted,
        "spec_accept_length": drafts.accept_length,
        "spec_num_correct_drafts": drafts.accepted,
        "spec_num_proposed_drafts": drafts.drafted,
        "spec_verify_ct": drafts.steps,
    }


def _finish(delta: Delta) -> dict[str, Any] | None:
    """Return SGLang's ``finish_reason`` object; None while the sequence runs."""
    if delta.finish_reason is None:
        return None
    if delta.finish_reason == "length":
        return {"type": "length", "length": delta.output_tokens}
    if delta.finish_reason == "stop":
        return {"type": "stop", "matched": delta.stop_reason}
    return {"type": "abort", "message": "aborted"}
